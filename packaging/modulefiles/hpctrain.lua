-- An environment module (Lmod) for an unpacked release archive, to be named MODULEPATH/hpctrain/VERSION.lua. Set `root` to the folder
-- of the archive.
help([[hpctrain trains neural networks on clusters that speak MPI.
Load the MPI module of the job beside it: the program opens that library at run time. On GPUs load CUDA, too (NVRTC, cuBLASLt).
hpctrain doctor checks the node.]])
whatis("Name: hpctrain")
whatis("Version: " .. myModuleVersion())
whatis("Description: distributed training of neural networks over MPI")

local root = "/opt/hpctrain/" .. myModuleVersion()
prepend_path("PATH", pathJoin(root, "bin"))
prepend_path("MANPATH", pathJoin(root, "share/man"))
prepend_path("FPATH", pathJoin(root, "share/zsh/site-functions"))
