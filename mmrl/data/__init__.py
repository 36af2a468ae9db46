"""Sources of prompts and the streams drawn from them: mixtures, curricula, pass-rate filters, demonstrations."""
