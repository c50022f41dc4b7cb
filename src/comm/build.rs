//! Compiles constants of the MPI library, whose values only its headers define, with the compiler
//! that the bindings were made with. Without the feature `linked-mpi` there is nothing to compile.

#[cfg(feature = "linked-mpi")]
fn main() -> Result<(), String> {
    const SOURCE: &str = "transport/mpi/constants.c";
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-env-changed=MPICC");
    let library = build_probe_mpi::probe().map_err(|errors| {
        format!(
            "no MPI library was found: {errors:?}; cargo build --no-default-features opens one at \
             run time instead"
        )
    })?;
    let mut compiler = cc::Build::new();
    compiler.file(SOURCE);
    match library.mpicc {
        Some(mpicc) => compiler.compiler(mpicc),
        None => compiler.includes(&library.include_paths),
    };
    compiler.try_compile("hpctrain_mpi").map_err(|e| e.to_string())
}

#[cfg(not(feature = "linked-mpi"))]
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}
