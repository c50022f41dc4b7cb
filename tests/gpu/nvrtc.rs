//! Every kernel compiles with NVIDIA's own compiler for the oldest and the newest device that is aimed at. It needs no
//! GPU. `scripts/setup --test` fetches it where it can; without it the test is skipped, and says so.

use std::path::Path;
use std::process::Command;

use hpctrain::backend::cuda::libraries;
use hpctrain::backend::cuda::program::{KERNELS, Variant, compile};

use crate::common::launch::{finish, test_name};

/// Set in the process that finds the compiler.
const ROLE: &str = "NVRTC_TEST_ROLE";

#[test]
fn every_kernel_compiles() {
    if std::env::var_os(ROLE).is_some() {
        return compile_all();
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("nvrtc");
    if !folder.join("libnvrtc.so.13").exists() {
        eprintln!("skipped: no NVRTC in {}; scripts/setup --test fetches it", folder.display());
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([&*test_name(), "--exact", "--nocapture"]).env("LD_LIBRARY_PATH", folder);
    finish(command.env(ROLE, "compile")).succeeded();
}

fn compile_all() {
    assert_eq!(libraries::nvrtc().unwrap(), "13.0");
    std::thread::scope(|scope| {
        for architecture in ["sm_80", "sm_90a"] {
            scope.spawn(move || KERNELS.iter().for_each(|source| compile_for(architecture, source.name)));
        }
    });
}

/// Compiles a source in every variant.
fn compile_for(architecture: &str, source: &'static str) {
    let heads: &[Option<usize>] = match source.starts_with("attention") {
        true => &[Some(64), Some(128), Some(24)],
        false => &[None],
    };
    for (&head, narrow) in heads.iter().flat_map(|head| [(head, false), (head, true)]) {
        let image = compile(Variant { source, narrow, head }, architecture).unwrap();
        assert_eq!(image[..4], *b"\x7fELF", "{source} for {architecture}");
    }
}
