//! The order of crates and modules: each knows only those below it.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod circles;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The crates of `src/`, each with those that it may use. All other folders are of the root's crate, which uses every one.
const CRATES: [(&str, &[&str]); 2] = [("base", &[]), ("data", &["base"])];

/// Modules by level, lowest first. A module may use those of lower levels.
const LEVELS: [&[&str]; 13] = [
    &[
        "activity",
        "control_groups",
        "energy",
        "error",
        "histogram",
        "panics",
        "pattern",
        "random",
        "regular_files",
        "simd",
        "tree",
        "visible",
    ],
    &["descriptors", "layout", "mesh", "own_files", "private", "signals", "spawn"],
    &["backend", "time_limit"],
    &["comm", "data"],
    &["nn", "optim"],
    &["parallel"],
    &["config", "telemetry", "topology"],
    &["checkpoint", "job", "placement"],
    &["engine", "run_dir"],
    &["evaluate", "planner", "run_records"],
    &["train", "bench", "report", "runs"],
    &["doctor", "servers", "supervise", "verify"],
    &["cli", "prelude"],
];

/// Uses within a level that are meant.
const BESIDE: [(&str, &str); 1] = [
    // The banner and the records describe the resolved configuration.
    ("telemetry", "config"),
];

/// Lower levels that a module keeps clear of nevertheless.
const APART: [(&str, &str); 2] = [("data", "backend"), ("data", "comm")];

/// The only files with `unsafe` in them.
const UNSAFE: [&str; 35] = [
    "backend/cpu/bf16/tile.rs",
    "backend/cpu/onednn.rs",
    "backend/cpu/product.rs",
    "backend/cpu/stream.rs",
    "backend/cpu/threads.rs",
    "backend/cuda/device.rs",
    "backend/cuda/device_copies.rs",
    "backend/cuda/event.rs",
    "backend/cuda/ints.rs",
    "backend/cuda/launch.rs",
    "backend/cuda/libraries.rs",
    "backend/cuda/matmul.rs",
    "backend/cuda/memory.rs",
    "backend/cuda/mod.rs",
    "backend/cuda/nccl.rs",
    "backend/cuda/pinned.rs",
    "backend/cuda/pool.rs",
    "backend/cuda/program.rs",
    "backend/cuda/scalar.rs",
    "backend/cuda/streams.rs",
    "backend/cuda/toolkit.rs",
    "backend/device_copies.rs",
    "backend/library.rs",
    "checkpoint/writeback.rs",
    "comm/wire/mpi/calls.rs",
    "comm/wire/mpi/exchange.rs",
    "comm/wire/mpi/mod.rs",
    "comm/wire/mpi/node.rs",
    "comm/wire/mpi/proof.rs",
    "comm/wire/mpi/request.rs",
    "comm/wire/mpi/segment.rs",
    "comm/wire/mpi/vendor.rs",
    "data/h5.rs",
    "data/hdf5_files.rs",
    "data/links.rs",
];

/// Every source file: its path below `src/`, its text without comments.
fn sources() -> BTreeMap<String, String> {
    texts().into_iter().map(|(file, text)| (file, code(&text))).collect()
}

/// Every source file: its path below `src/`, its text.
fn texts() -> BTreeMap<String, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = BTreeMap::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let name = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                files.insert(name, std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    files
}

/// A text without its comments. Block comments and comment signs in strings do not occur.
fn code(text: &str) -> String {
    let lines = text.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// The module of a file: `train` for `train/run.rs`, `error` for `base/error.rs`; none for the roots of library and program, and for
/// that of the crate of small modules.
fn module(file: &str) -> Option<&str> {
    let first = file.strip_prefix("base/").unwrap_or(file).split(['/', '.']).next().unwrap();
    (!["lib", "main", "mod"].contains(&first)).then_some(first)
}

/// Whether a name after `crate::` is that of a module inside the file's own crate.
fn is_inner(sources: &BTreeMap<String, String>, file: &str, name: &str) -> bool {
    CRATES.iter().filter(|(crate_of, _)| *crate_of != "base" && file.starts_with(&format!("{crate_of}/"))).any(
        |(crate_of, _)| {
            let names = [format!("{crate_of}/{name}.rs"), format!("{crate_of}/{name}/mod.rs")];
            let is_module = LEVELS.iter().any(|level| level.contains(&name));
            !is_module || names.iter().any(|name| sources.contains_key(name))
        },
    )
}

/// The word at the start of a text.
fn word(text: &str) -> &str {
    let end = text.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(text.len());
    &text[..end]
}

/// The modules after `crate::`: one, or those of a list in braces.
fn used(text: &str) -> Vec<String> {
    let Some(list) = text.strip_prefix('{') else { return vec![word(text).to_owned()] };
    let mut modules = Vec::new();
    let (mut depth, mut item) = (1, true);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 1 => item = true,
            c if item && !c.is_whitespace() => {
                modules.push(word(&list[at..]).to_owned());
                item = false;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    modules
}

/// A file's text without its tests, which may use what they like.
fn shipped<'a>(file: &str, text: &'a str) -> &'a str {
    if file.ends_with("/tests.rs") {
        return "";
    }
    text.split_once("#[cfg(test)]\nmod tests {").map_or(text, |(code, _)| code)
}

/// The uses between modules, with the files that have them.
fn edges(sources: &BTreeMap<String, String>) -> BTreeMap<(String, String), BTreeSet<String>> {
    let mut edges: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for (file, text) in sources {
        let Some(module) = module(file) else { continue };
        let text = shipped(file, text);
        for (at, path) in text.match_indices("crate::") {
            let others = used(&text[at + path.len()..]).into_iter();
            for other in others.filter(|other| other != module && !is_inner(sources, file, other)) {
                edges.entry((module.to_owned(), other)).or_default().insert(file.clone());
            }
        }
    }
    edges
}

fn level(module: &str) -> usize {
    let found = LEVELS.iter().position(|level| level.contains(&module));
    found.unwrap_or_else(|| panic!("module {module} has no level: add it to the table"))
}

#[test]
fn modules_use_only_lower_ones() {
    let sources = sources();
    let modules: BTreeSet<&str> = sources.keys().filter_map(|file| module(file)).collect();
    let known: BTreeSet<&str> = LEVELS.iter().flat_map(|level| level.iter().copied()).collect();
    assert_eq!(modules, known, "the modules of src/ and those of the table");

    let edges = edges(&sources);
    let listed = |table: &[(&str, &str)], from: &str, to: &str| table.contains(&(from, to));
    let mut wrong = Vec::new();
    for ((from, to), files) in &edges {
        let downward = level(to) < level(from) && !listed(&APART, from, to);
        let beside = level(to) == level(from) && listed(&BESIDE, from, to);
        if !downward && !beside {
            wrong.push(format!("{from} ({}) uses {to} ({}) in {files:?}", level(from), level(to)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for (from, to) in BESIDE {
        assert!(edges.contains_key(&(from.into(), to.into())), "{from} no longer uses {to}: take it off the list");
    }
    // The reader finds what is there.
    assert!(edges.contains_key(&("cli".into(), "train".into())) && edges.len() > 30, "{edges:?}");
}

#[test]
fn crates_use_only_lower_ones() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut seen = BTreeSet::new();
    for (name, may_use) in CRATES {
        let manifest = std::fs::read_to_string(root.join("src").join(name).join("Cargo.toml")).unwrap();
        let manifest: toml::Table = manifest.parse().unwrap();
        let dependencies = manifest["dependencies"].as_table().unwrap().keys();
        let own: BTreeSet<&str> = dependencies.filter_map(|name| name.strip_prefix("hpctrain-")).collect();
        assert_eq!(own, may_use.iter().copied().collect(), "src/{name}/Cargo.toml");
        assert!(may_use.iter().all(|other| seen.contains(other)), "{name} stands before one that it uses");
        seen.insert(name);
    }
    // A folder with a manifest is one of the list.
    let folders = std::fs::read_dir(root.join("src")).unwrap().map(|entry| entry.unwrap().path());
    let crates = folders.filter(|folder| folder.join("Cargo.toml").exists());
    let names: BTreeSet<String> = crates.map(|folder| folder.file_name().unwrap().to_str().unwrap().into()).collect();
    assert_eq!(names, seen.iter().map(|name| (*name).to_owned()).collect());
}

/// The rows of the page on architecture: each module with those that it uses, highest first.
fn table() -> String {
    let edges = edges(&sources());
    let mut table = String::from("| module | uses |\n|---|---|\n");
    for module in LEVELS.iter().rev().flat_map(|level| level.iter()) {
        let mut used: Vec<&str> =
            edges.keys().filter(|(from, _)| from == module).map(|(_, to)| &**to).filter(|to| *to != "error").collect();
        used.sort_by_key(|to| std::cmp::Reverse(level(to)));
        let used: Vec<String> = used.iter().map(|to| format!("`{to}`")).collect();
        table += &format!("| `{module}` | {} |\n", used.join(", "));
    }
    table
}

#[test]
fn the_page_on_architecture_has_this_table() {
    const BEGIN: &str = "<!-- written by tests/architecture -->\n";
    const END: &str = "<!-- end -->\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/architecture.md");
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (there, after) = rest.split_once(END).unwrap();
    if std::env::var_os("UPDATE").is_some() {
        return std::fs::write(&path, [before, BEGIN, &table(), END, after].concat()).unwrap();
    }
    assert_eq!(there, table(), "the page is out of date; write it: UPDATE=1 cargo test --test architecture");
}

#[test]
fn unsafe_code_stays_where_it_is() {
    let sources = sources();
    let uses = |text: &str| text.match_indices("unsafe").any(|(at, found)| word(&text[at..]) == found);
    let found: Vec<&str> = sources.iter().filter(|(_, text)| uses(text)).map(|(file, _)| file.as_str()).collect();
    assert_eq!(found, UNSAFE);
}

#[test]
fn paths_are_read() {
    assert_eq!(used("comm::{self, Comm};"), ["comm"]);
    assert_eq!(
        used("{backend::{Kernels, MemoryKind}, comm, error::{Error, Result}};\nuse std"),
        ["backend", "comm", "error"]
    );
    assert_eq!(code("a // crate::b\nc\n"), "a \nc\n");
    let modules =
        ["train/run.rs", "placement.rs", "base/mesh.rs", "base/energy/mod.rs", "base/mod.rs", "lib.rs"].map(module);
    assert_eq!(modules, [Some("train"), Some("placement"), Some("mesh"), Some("energy"), None, None]);
}
