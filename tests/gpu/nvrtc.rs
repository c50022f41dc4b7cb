//! Every kernel compiles with NVIDIA's compiler for the oldest and the newest supported device, and
//! uses the registers, local and shared memory recorded in `tests/gpu/registers.txt`. No GPU is
//! needed. `scripts/setup --test` fetches the compiler if it can; without it the test is skipped
//! with a message.
//!
//! `UPDATE=1 cargo test --test gpu nvrtc::` rewrites the table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use hpctrain::backend::cuda::libraries;
use hpctrain::backend::cuda::nvrtc::{KERNELS, Variant, compile};

use super::cubin::{Resources, functions};
use hpctrain_testkit::launch::{finish, test_name};

/// Set in the process that compiles.
const ROLE: &str = "NVRTC_TEST_ROLE";

/// The version of the compiler whose results are in the table.
const VERSION: &str = "13.0";

const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];

/// The bytes of local memory that a kernel may use. Divisions use some in rare paths; a kernel that
/// spills registers uses more, and is slow.
const MOST_LOCAL: u32 = 32;

/// How often a source is recompiled if its kernels differ from the table: the compiler is not
/// deterministic. In about one of eight runs a kernel used 108 registers instead of 106.
const MORE: usize = 5;

/// The path of the table.
const TABLE: &str = "tests/gpu/registers.txt";

const HEAD: &str = "\
# Registers of a thread, bytes of its local memory and of a block's own shared memory, for sm_80 and sm_90a, as the compiler of
# CUDA 13.0 chooses them. Written by UPDATE=1 cargo test --test gpu nvrtc::
";

/// A source and its variant, and a function.
type Name = (String, String);

#[test]
fn every_kernel_compiles_without_spilling() {
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
    assert_eq!(libraries::nvrtc().unwrap(), VERSION);
    let found = resources(&KERNELS.map(|source| source.name));
    let spills: Vec<_> = found.iter().flatten().filter(|(_, of)| of.local > MOST_LOCAL).collect();
    assert!(spills.is_empty(), "more than {MOST_LOCAL} bytes of local memory: {spills:#?}");

    let now = table(&found);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(TABLE);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, now).unwrap();
        return;
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_default();
    let kept: Vec<&str> = kept.lines().collect();
    let mut seen: BTreeSet<String> = now.lines().map(str::to_owned).collect();
    let gone = |seen: &BTreeSet<String>| {
        kept.iter().copied().filter(|&line| !seen.contains(line)).collect::<Vec<_>>()
    };
    for _ in 0..MORE {
        let missing = gone(&seen);
        let of_missing =
            |source: &&str| missing.iter().any(|line| line.split(' ').next() == Some(source));
        let again: Vec<&'static str> =
            KERNELS.iter().map(|source| source.name).filter(of_missing).collect();
        if again.is_empty() {
            break;
        }
        seen.extend(table(&resources(&again)).lines().map(str::to_owned));
    }
    let gone = gone(&seen);
    if !gone.is_empty() || kept.len() != now.lines().count() {
        let gone = gone.iter().map(|line| format!("- {line}\n"));
        let new = now.lines().filter(|line| !kept.contains(line)).map(|line| format!("+ {line}\n"));
        let differ: String = gone.chain(new).collect();
        panic!("{TABLE} is not current (UPDATE=1 writes it):\n{differ}");
    }
}

/// Returns the resources of the kernels of some sources, for each architecture.
fn resources(sources: &[&'static str]) -> [BTreeMap<Name, Resources>; 2] {
    ARCHITECTURES.map(|architecture| {
        sources.iter().flat_map(|source| compile_for(architecture, source)).collect()
    })
}

/// Compiles a source in every variant, and returns the resources of its functions.
fn compile_for(architecture: &str, source: &'static str) -> BTreeMap<Name, Resources> {
    // f32 and bf16; the tensor-core kernels (bf16 only) have more shapes.
    let heads: &[(Option<usize>, &[bool])] = match source.starts_with("attention") {
        true => &[
            (Some(64), &[false, true]),
            (Some(128), &[false, true]),
            (Some(24), &[false, true]),
            (Some(32), &[true]),
            (Some(33), &[true]),
            (Some(256), &[true]),
        ],
        false => &[(None, &[false, true])],
    };
    let mut found = BTreeMap::new();
    for (&head, &narrow) in
        heads.iter().flat_map(|(head, narrow)| narrow.iter().map(move |narrow| (head, narrow)))
    {
        let image = compile(Variant { source, narrow, head }, architecture).unwrap();
        let element = if narrow { "bf16" } else { "f32" };
        let variant = format!(
            "{source} {element}{}",
            head.map_or(String::new(), |head| format!(" head {head}"))
        );
        let functions = functions(&image);
        assert!(!functions.is_empty(), "{variant} for {architecture}");
        found.extend(functions.into_iter().map(|(function, of)| ((variant.clone(), function), of)));
    }
    found
}

/// Formats a line for each function, with its resources on each device.
fn table([old, new]: &[BTreeMap<Name, Resources>; 2]) -> String {
    let mut text = HEAD.to_owned();
    for (name, here) in old {
        let (variant, function) = name;
        let columns = |of: &Resources| format!("{:4} {:4} {:6}", of.registers, of.local, of.shared);
        let _ =
            writeln!(text, "{variant:34} {function:30} {}  {}", columns(here), columns(&new[name]));
    }
    text
}
