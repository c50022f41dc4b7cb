//! `scripts/setup` finds what the build can use, and nothing else.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Output};

/// Runs `scripts/setup --linked --check` in the present environment, with `folder/bin` first in the search
/// path, and with `variables`.
fn check(folder: &Path, variables: &[(&str, &str)]) -> Output {
    let path = format!("{}:{}", folder.join("bin").display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/setup"));
    command.args(["--linked", "--check"]).env("PATH", path);
    for name in ["MPICC", "HDF5_DIR", "LIBCLANG_PATH"] {
        command.env_remove(name);
    }
    command.envs(variables.iter().copied()).output().unwrap()
}

/// Creates a program that is found instead of an installed one.
fn program(folder: &Path, name: &str, script: &str) {
    let bin = folder.join("bin");
    fs::create_dir_all(&bin).unwrap();
    fs::write(bin.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).unwrap();
}

#[track_caller]
fn refused(output: Output, words: &str) {
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), stderr.contains(words)), (Some(1), true), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
}

#[test]
fn a_machine_that_builds_this_test_passes() {
    let folder = tempfile::tempdir().unwrap();
    let output = check(folder.path(), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn another_library_of_llvm_is_not_libclang() {
    let folder = tempfile::tempdir().unwrap();
    let llvm = folder.path().join("llvm/lib");
    fs::create_dir_all(llvm.join("clang/14/include")).unwrap();
    fs::write(llvm.join("clang/14/include/stddef.h"), "").unwrap();
    for name in ["libclang-cpp.so.14", "libclang-cpp.so"] {
        fs::write(llvm.join(name), "").unwrap();
    }
    let llvm_path = llvm.to_str().unwrap();
    refused(check(folder.path(), &[("LIBCLANG_PATH", llvm_path)]), "holds no libclang.so");
    // With libclang and the headers of its compiler the check passes; without the headers it does
    // not.
    fs::write(llvm.join("libclang-14.so.14"), "").unwrap();
    assert!(check(folder.path(), &[("LIBCLANG_PATH", llvm_path)]).status.success());
    fs::remove_dir_all(llvm.join("clang")).unwrap();
    let bare = check(folder.path(), &[("LIBCLANG_PATH", llvm_path)]);
    // A system-wide folder of headers serves every libclang.
    let has_system_headers = fs::read_dir("/usr/lib/clang").is_ok();
    assert_eq!(
        bare.status.success(),
        has_system_headers,
        "{}",
        String::from_utf8_lossy(&bare.stderr)
    );
}

#[test]
fn variables_with_invalid_paths_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name| folder.path().join(name).display().to_string();
    for (variable, words) in [
        ("LIBCLANG_PATH", "holds no libclang.so"),
        ("HDF5_DIR", "holds no HDF5"),
        ("MPICC", "is not a program"),
    ] {
        let missing = at("nowhere");
        refused(
            check(folder.path(), &[(variable, &missing)]),
            &format!("{variable}={missing} {words}"),
        );
    }
}

#[test]
fn hdf5_is_headers_of_a_late_version_and_a_library_that_links() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("hdf5");
    let checked = || check(folder.path(), &[("HDF5_DIR", root.to_str().unwrap())]);
    fs::create_dir_all(root.join("include")).unwrap();
    fs::create_dir_all(root.join("lib")).unwrap();
    fs::write(root.join("include/H5pubconf.h"), "").unwrap();
    let version = |minor, release| {
        let text = format!(
            "#define H5_VERS_MAJOR 1\n#define H5_VERS_MINOR {minor}\n#define H5_VERS_RELEASE {release}\n"
        );
        fs::write(root.join("include/H5public.h"), text).unwrap();
    };
    version(10, 8);
    refused(checked(), "holds no HDF5");
    fs::write(root.join("lib/libhdf5.so"), "no library").unwrap();
    refused(checked(), "holds no HDF5");
    fs::write(folder.path().join("h5.c"), "int H5open(void) { return 0; }").unwrap();
    let mut compiler = Command::new("cc");
    compiler
        .arg("-shared")
        .arg(folder.path().join("h5.c"))
        .arg("-o")
        .arg(root.join("lib/libhdf5.so"));
    assert!(compiler.status().unwrap().success());
    assert!(checked().status.success());
    version(8, 21);
    refused(checked(), "holds no HDF5 of 1.10.5 or later");
}

#[test]
fn mpi_is_a_compiler_with_headers_and_a_launcher_of_the_same_library() {
    let folder = tempfile::tempdir().unwrap();
    program(folder.path(), "mpicc", "exit 1");
    refused(check(folder.path(), &[]), "missing: mpi");
    let folder = tempfile::tempdir().unwrap();
    // The launcher is that of the other library: Open MPI's for MPICH, and MPICH's for Open MPI.
    let other = r#"case "$(echo '#include <mpi.h>' | mpicc -E -dM -x c -)" in *OMPI_MAJOR_VERSION*) echo HYDRA ;; *) echo "(Open MPI) 4.1" ;; esac"#;
    program(folder.path(), "mpirun", other);
    refused(check(folder.path(), &[]), "missing: mpi");
    // A launcher that does not name its library is accepted.
    program(folder.path(), "mpirun", "echo a launcher");
    assert!(check(folder.path(), &[]).status.success());
}

/// Without `mpicc` the program opens the MPI library at run time: the build reads no header of MPI,
/// so it needs no libclang.
#[test]
fn without_a_compiler_of_mpi_a_launcher_is_enough() {
    let folder = tempfile::tempdir().unwrap();
    let bin = folder.path().join("bin");
    fs::create_dir_all(&bin).unwrap();
    let path = std::env::var_os("PATH").unwrap();
    for programs in std::env::split_paths(&path).filter_map(|folder| fs::read_dir(folder).ok()) {
        for program in programs.flatten() {
            // The first in the search path counts.
            let _ = std::os::unix::fs::symlink(program.path(), bin.join(program.file_name()));
        }
    }
    // Debian's package of the launcher has such a compiler, too.
    fs::remove_file(bin.join("mpicc")).unwrap();
    program(folder.path(), "mpicc", "exit 1");
    let asked = |arguments: &[&str]| {
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/setup"));
        command.arg("--check").args(arguments).env("PATH", &bin).env_remove("MPICC");
        command.env("LIBCLANG_PATH", "/nowhere").output().unwrap()
    };
    let output = asked(&[]);
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("--no-default-features"), "{output:?}");
    let output = asked(&["--features"]);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "--no-default-features\n");
    refused(asked(&["--linked"]), "holds no libclang.so");
}
