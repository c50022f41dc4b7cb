# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.cargo import CargoPackage

from spack.package import *


class Hpctrain(CargoPackage):
    """Trains neural networks on clusters that speak MPI: sharded HDF5 data in, checkpoints out."""

    homepage = "https://github.com/OWNER/hpctrain"
    url = "https://github.com/OWNER/hpctrain/archive/refs/tags/v0.1.0.tar.gz"
    git = "https://github.com/OWNER/hpctrain.git"

    maintainers("OWNER")

    license("MIT OR Apache-2.0")

    version("main", branch="main")

    # Libraries of GPUs are opened at run time: nothing of CUDA is needed to build.
    variant("cuda", default=False, description="Bring NVRTC and cuBLASLt, which GPUs need at run time")
    variant("nccl", default=False, when="+cuda", description="Bring NCCL for messages between GPUs")
    variant("onednn", default=False, description="Bring oneDNN, an alternative for GEMMs on the CPU")

    depends_on("c", type="build")
    depends_on("cxx", type="build")  # regular expressions of tokenizers (onig)
    depends_on("rust@1.89:", type="build")
    depends_on("pkgconfig", type="build")

    # The MPI library is opened at run time, by name: that of the spec is the first in the search path.
    depends_on("mpi@3:", type=("link", "run"))
    # Each rank opens its shards alone, so the serial library is enough.
    depends_on("hdf5@1.10.5: +shared")

    depends_on("cuda@12.9:", type="run", when="+cuda")
    depends_on("nccl", type="run", when="+nccl")
    depends_on("onednn@2:", type="run", when="+onednn")

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        env.set("HDF5_DIR", self.spec["hdf5"].prefix)

    @property
    def build_args(self):
        return ["--locked", "--no-default-features"]

    def setup_run_environment(self, env: EnvironmentModifications) -> None:
        for folder in self.spec["mpi"].libs.directories:
            env.prepend_path("LD_LIBRARY_PATH", folder)
        if self.spec.satisfies("+cuda"):
            for folder in ("lib64", "lib"):
                env.prepend_path("LD_LIBRARY_PATH", join_path(self.spec["cuda"].prefix, folder))
        for name in ("nccl", "onednn"):
            if self.spec.satisfies(f"+{name}"):
                for folder in self.spec[name].libs.directories:
                    env.prepend_path("LD_LIBRARY_PATH", folder)

    @run_after("install")
    def install_completions(self):
        program = Executable(self.prefix.bin.hpctrain)
        for shell, folder, name in (
            ("bash", bash_completion_path(self.prefix), "hpctrain"),
            ("fish", fish_completion_path(self.prefix), "hpctrain.fish"),
            ("zsh", zsh_completion_path(self.prefix), "_hpctrain"),
        ):
            mkdirp(folder)
            with open(join_path(folder, name), "w") as file:
                program("completions", shell, output=file)
        program("man", "--out", self.prefix.share.man.man1)

    def test_doctor(self):
        """the program starts and finds its libraries"""
        which(self.prefix.bin.hpctrain)("doctor", "--help")

    def test_two_ranks(self):
        """two ranks of this MPI train"""
        launcher = which(join_path(self.spec["mpi"].prefix.bin, "mpiexec"))
        with working_dir(self.test_suite.stage, create=True):
            launcher("-n", "2", self.prefix.bin.hpctrain, "--set", "run.steps=2", "--set", "run.name=spack-test")
