"""What is about robots only: simulators, action codecs, policies that act, data sets and experts."""

if __name__ != "mmrl.robotics":  # the repository's root is on sys.path
    raise ImportError(
        f"expected `import mmrl.robotics`, found an import as `{__name__}`: it would make a second copy of every module in it. "
        "Write mmrl.robotics; for a package `robotics` of your own, take mmrl's repository off PYTHONPATH or put yours before it"
    )
