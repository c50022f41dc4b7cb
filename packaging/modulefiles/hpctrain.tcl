#%Module
# An environment module for an unpacked release archive, to be named MODULEPATH/hpctrain/VERSION. Set `root` to the folder of the
# archive.
proc ModulesHelp {} {
    puts stderr "hpctrain trains neural networks on clusters that speak MPI."
    puts stderr "Load the MPI module of the job beside it: the program opens that library at run time. On GPUs load CUDA, too."
    puts stderr "hpctrain doctor checks the node."
}
module-whatis "distributed training of neural networks over MPI"

set version [file tail [module-info name]]
set root /opt/hpctrain/$version
prepend-path PATH $root/bin
prepend-path MANPATH $root/share/man
prepend-path FPATH $root/share/zsh/site-functions
