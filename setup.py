"""What pyproject.toml can't say: the folder `kernels` travels in the wheel as `mailboat._kernels`.

So no top-level module of that common name lands beside other people's packages. Everything else is in pyproject.toml.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["mailboat*"]), "mailboat._kernels"],
    package_dir={"mailboat._kernels": "kernels"},
)
