//! Every kernel compiles with NVIDIA's own compiler for the oldest and the newest device that is
//! aimed at, and takes the registers, local and shared memory that `tests/gpu/registers.txt` says.
//! It needs no GPU. `scripts/setup --test` fetches the compiler where it can; without it the test
//! is skipped, and says so.
//!
//! `UPDATE=1 cargo test --test gpu nvrtc::` writes the table anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use hpctrain::backend::cuda::libraries;
use hpctrain::backend::cuda::nvrtc::{KERNELS, Variant, compile};

use super::cubin::{Resources, functions};
use hpctrain_testkit::launch::{finish, test_name};

/// Set in the process that finds the compiler.
const ROLE: &str = "NVRTC_TEST_ROLE";

/// The version of the compiler whose choices the table has.
const VERSION: &str = "13.0";

const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];

/// Bytes of local memory that a kernel may take. Divisions keep some in paths that are seldom
/// taken; a kernel whose registers do not hold its work takes more, and is slow.
const MOST_LOCAL: u32 = 32;

/// Times that a source is compiled again whose kernels differ from the table: the compiler does not
/// always choose alike. Once in some eight runs a kernel took 108 registers in place of 106.
const MORE: usize = 5;

/// Its place in the repository.
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

/// The kernels of some sources, for each architecture.
fn resources(sources: &[&'static str]) -> [BTreeMap<Name, Resources>; 2] {
    ARCHITECTURES.map(|architecture| {
        sources.iter().flat_map(|source| compile_for(architecture, source)).collect()
    })
}

/// Compiles a source in every variant: the resources of its functions.
fn compile_for(architecture: &str, source: &'static str) -> BTreeMap<Name, Resources> {
    // Of f32 and bf16; the kernels for tensor cores, of bf16 alone, have more shapes.
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

/// A line for each function, with its resources on each device.
fn table([old, new]: &[BTreeMap<Name, Resources>; 2]) -> String {
    let mut text = HEAD.to_owned();
    for (name, here) in old {
        let (variant, function) = name;
        let told = |of: &Resources| format!("{:4} {:4} {:6}", of.registers, of.local, of.shared);
        let _ = writeln!(text, "{variant:34} {function:30} {}  {}", told(here), told(&new[name]));
    }
    text
}
