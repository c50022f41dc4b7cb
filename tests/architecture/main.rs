//! The order of crates, and of areas inside them: each knows only those below it.
#![allow(clippy::unwrap_used, reason = "a failure is the test's failure")]

mod circles;
mod glossary;
mod names;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The crates of `src/`, each with those that it uses, lowest first. All other folders are of the
/// root's crate, which uses every one.
const CRATES: [(&str, &[&str]); 17] = [
    ("base", &[]),
    ("data", &["base"]),
    ("device", &["base"]),
    ("device_tests", &["base", "device"]),
    ("cpu", &["base", "device"]),
    ("cuda", &["base", "device"]),
    ("comm", &["base", "cpu", "device"]),
    ("nn", &["base", "comm", "cpu", "cuda", "data", "device"]),
    ("parallel", &["base", "comm", "cpu", "device", "nn"]),
    ("config", &["base", "comm", "cpu", "cuda", "data", "device", "nn", "parallel"]),
    ("checkpoint", &["base", "comm", "config", "cpu", "data", "device", "nn", "parallel"]),
    ("engine", &["base", "comm", "config", "cpu", "data", "device", "nn", "parallel"]),
    (
        "train",
        &[
            "base",
            "checkpoint",
            "comm",
            "config",
            "cpu",
            "cuda",
            "data",
            "device",
            "engine",
            "nn",
            "parallel",
        ],
    ),
    (
        "parameter_server",
        &[
            "base",
            "checkpoint",
            "comm",
            "config",
            "cpu",
            "data",
            "device",
            "engine",
            "nn",
            "parallel",
            "train",
        ],
    ),
    ("report", &["base", "checkpoint", "config", "data"]),
    ("watch", &["base", "checkpoint", "config", "report"]),
    (ROOT, &[]),
];

/// The name of the root's crate in these tables.
const ROOT: &str = "hpctrain";

/// Areas of crates that have several, by level, lowest first: an area uses those of lower levels.
/// Files that are in none of these folders are an area with the name of the crate.
const AREAS: [(&str, &[&[&str]]); 6] = [
    ("nn", &[&["optim"], &["nn"]]),
    ("config", &[&["config"], &["telemetry", "topology"], &["job", "gpu_assignment"]]),
    ("checkpoint", &[&["checkpoint"], &["run_dir"]]),
    ("train", &[&["evaluate", "planner"], &["train"]]),
    ("report", &[&["run_records"], &["report", "runs"]]),
    (
        ROOT,
        &[
            &["bench"],
            &["doctor", "submit", "supervise", "verify"],
            &["replay"],
            &["cli"],
            &["prelude"],
            &[ROOT],
        ],
    ),
];

/// The only files with `unsafe` in them.
const UNSAFE: [&str; 43] = [
    "checkpoint/memory/slot_memory.rs",
    "checkpoint/writeback.rs",
    "comm/environment.rs",
    "comm/transport/mpi/calls.rs",
    "comm/transport/mpi/collectives.rs",
    "comm/transport/mpi/cuda_probe.rs",
    "comm/transport/mpi/exchange.rs",
    "comm/transport/mpi/ffi.rs",
    "comm/transport/mpi/library.rs",
    "comm/transport/mpi/mod.rs",
    "comm/transport/mpi/node.rs",
    "comm/transport/mpi/request.rs",
    "comm/transport/mpi/shm_window.rs",
    "comm/transport/mpi/ulfm.rs",
    "cpu/bf16/microkernel.rs",
    "cpu/gemm.rs",
    "cpu/nontemporal.rs",
    "cpu/onednn.rs",
    "cpu/threads.rs",
    "cuda/device.rs",
    "cuda/device_memcpy.rs",
    "cuda/event.rs",
    "cuda/index_upload.rs",
    "cuda/ipc.rs",
    "cuda/launch.rs",
    "cuda/libraries.rs",
    "cuda/library_versions.rs",
    "cuda/matmul.rs",
    "cuda/memory.rs",
    "cuda/mod.rs",
    "cuda/nccl.rs",
    "cuda/nvrtc.rs",
    "cuda/ordered_sum.rs",
    "cuda/pinned.rs",
    "cuda/pool.rs",
    "cuda/scalar.rs",
    "cuda/streams.rs",
    "cuda/upload_staging.rs",
    "data/external_links.rs",
    "data/h5.rs",
    "data/hdf5_open.rs",
    "device/device_memcpy.rs",
    "device/library.rs",
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

/// The crate of a file.
fn crate_of(file: &str) -> &str {
    let folder = file.split('/').next().unwrap_or_default();
    CRATES.iter().map(|(name, _)| *name).find(|name| *name == folder).unwrap_or(ROOT)
}

/// The area of a file in its crate, which has some, or of a name after `crate::` there.
fn area<'a>(levels: &[&[&'a str]], crate_of: &'a str, name: &str) -> &'a str {
    levels
        .iter()
        .flat_map(|level| level.iter().copied())
        .find(|area| *area == name)
        .unwrap_or(crate_of)
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
    let mut depth = 1;
    let mut item = true;
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

#[test]
fn areas_use_only_lower_ones() {
    let sources = sources();
    let mut wrong = Vec::new();
    let mut uses = 0;
    for (name, levels) in AREAS {
        let level = |area: &str| levels.iter().position(|level| level.contains(&area)).unwrap();
        for (file, text) in sources.iter().filter(|(file, _)| crate_of(file) == name) {
            let inside =
                file.strip_prefix(name).and_then(|rest| rest.strip_prefix('/')).unwrap_or(file);
            let from = area(levels, name, inside.split(['/', '.']).next().unwrap());
            // The root of a crate hands on what all areas have.
            if ["mod.rs", "lib.rs", "main.rs"].contains(&inside) {
                continue;
            }
            let text = shipped(file, text);
            for (at, path) in text.match_indices("crate::") {
                // Another crate, under the name that the root hands on.
                let own = |other: &String| name != ROOT || level_of_root(other);
                for to in used(&text[at + path.len()..]).iter().filter(|other| own(other)) {
                    let to = area(levels, name, to);
                    uses += usize::from(to != from);
                    if to != from && level(to) >= level(from) {
                        wrong.push(format!("{name}: {from} uses {to} in {file}"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    // The reader finds what is there.
    assert!(uses > 30, "{uses} uses of other areas");
}

/// Whether a name after `crate::` is that of an area of the root's crate.
fn level_of_root(name: &str) -> bool {
    AREAS.iter().any(|(of, levels)| *of == ROOT && levels.iter().any(|level| level.contains(&name)))
}

/// The manifest of a crate.
fn manifest(name: &str) -> toml::Table {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = if name == ROOT { root.to_path_buf() } else { root.join("src").join(name) };
    std::fs::read_to_string(folder.join("Cargo.toml")).unwrap().parse().unwrap()
}

/// The crates of hpctrain in a table of dependencies, by their folders.
fn own(dependencies: &toml::Value) -> BTreeSet<String> {
    let names = dependencies.as_table().unwrap().keys();
    names.filter_map(|name| Some(name.strip_prefix("hpctrain-")?.replace('-', "_"))).collect()
}

#[test]
fn crates_use_only_lower_ones() {
    let mut seen = BTreeSet::new();
    for (name, may_use) in CRATES {
        let manifest = manifest(name);
        let uses = own(&manifest["dependencies"]);
        if name == ROOT {
            let all: BTreeSet<String> =
                seen.iter().filter(|name| **name != "device_tests").cloned().collect();
            assert_eq!(uses, all, "Cargo.toml");
            continue;
        }
        assert_eq!(
            uses,
            may_use.iter().map(|name| (*name).to_owned()).collect(),
            "src/{name}/Cargo.toml"
        );
        assert!(
            may_use.iter().all(|other| seen.contains(*other)),
            "{name} stands before one that it uses"
        );
        seen.insert(name.to_owned());
        // Tests of a crate use no higher one: there would be two of what both are made of.
        let tests = manifest.get("dev-dependencies").map(own).unwrap_or_default();
        assert!(tests.is_subset(&seen), "src/{name}/Cargo.toml: tests use {tests:?}");
    }
    // A folder with a manifest is one of the list.
    let folders = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
    let crates = folders
        .map(|entry| entry.unwrap().path())
        .filter(|folder| folder.join("Cargo.toml").exists());
    let names: BTreeSet<String> =
        crates.map(|folder| folder.file_name().unwrap().to_str().unwrap().into()).collect();
    assert_eq!(names, seen);
}

#[test]
fn crates_without_unsafe_code_forbid_it() {
    for (name, _) in CRATES {
        let root = if name == ROOT { "src/lib.rs".into() } else { format!("src/{name}/mod.rs") };
        let text =
            std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(&root)).unwrap();
        let has_some = UNSAFE.iter().any(|file| crate_of(file) == name);
        assert_eq!(text.contains("\n#![forbid(unsafe_code)]\n"), !has_some, "{root}");
    }
}

/// The rows of the page on architecture: each crate with those that it uses, highest first.
fn table() -> String {
    let mut table = String::from("| crate | uses |\n|---|---|\n");
    for (name, uses) in CRATES.iter().rev().filter(|(name, _)| *name != ROOT) {
        let place = |name: &str| CRATES.iter().position(|(other, _)| *other == name);
        let mut uses = uses.to_vec();
        uses.sort_by_key(|name| std::cmp::Reverse(place(name)));
        let uses: Vec<String> = uses.iter().map(|to| format!("`{to}`")).collect();
        table += &format!("| `{name}` | {} |\n", uses.join(", "));
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
    assert_eq!(
        there,
        table(),
        "the page is out of date; write it: UPDATE=1 cargo test --test architecture"
    );
}

#[test]
fn unsafe_code_stays_where_it_is() {
    let sources = sources();
    let uses =
        |text: &str| text.match_indices("unsafe").any(|(at, found)| word(&text[at..]) == found);
    let found: Vec<&str> =
        sources.iter().filter(|(_, text)| uses(text)).map(|(file, _)| file.as_str()).collect();
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
    assert_eq!(["train/run/mod.rs", "cli/mod.rs", "lib.rs"].map(crate_of), ["train", ROOT, ROOT]);
}

/// The words of an array of a shell script, `NAME=(WORD …)`.
fn array<'a>(script: &'a str, name: &str) -> Vec<&'a str> {
    let start = script
        .find(&format!("\n{name}=("))
        .unwrap_or_else(|| panic!("scripts/test has no array {name}"));
    let words = script[start..].split_once('(').unwrap().1;
    words.split_once(')').unwrap().0.split_whitespace().collect()
}

#[test]
fn every_test_program_is_run() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let script = std::fs::read_to_string(root.join("scripts/test")).unwrap();
    let mut run: Vec<&str> =
        ["waiting", "computing"].iter().flat_map(|name| array(&script, name)).collect();
    run.sort_unstable();
    let mut programs = Vec::new();
    for entry in std::fs::read_dir(root.join("tests")).unwrap() {
        let path = entry.unwrap().path();
        if path.join("main.rs").exists()
            || path.extension().is_some_and(|extension| extension == "rs")
        {
            programs.push(path.file_stem().unwrap().to_str().unwrap().to_owned());
        }
    }
    programs.sort_unstable();
    assert_eq!(run, programs);
}

/// The anchor that a heading gets.
fn anchor(heading: &str) -> String {
    let text = heading.replace(['`', '*'], "").to_lowercase();
    let kept = text.trim().chars().filter(|c| c.is_alphanumeric() || "_- ".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// A page without its blocks of code.
fn prose(page: &str) -> String {
    page.split("```").step_by(2).collect()
}

#[test]
fn links_between_pages_lead_to_headings() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut pages: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benches/results/README.md"]
            .map(|name| root.join(name))
            .into();
    pages.extend(std::fs::read_dir(root.join("docs")).unwrap().map(|entry| entry.unwrap().path()));
    pages.retain(|page| page.extension().is_some_and(|extension| extension == "md"));
    for page in &pages {
        let text = prose(&std::fs::read_to_string(page).unwrap());
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.contains("://") || link.contains(char::is_whitespace) {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let to = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            assert!(to.exists(), "{}: {link} does not exist", page.display());
            if heading.is_empty() {
                continue;
            }
            let target = prose(&std::fs::read_to_string(&to).unwrap());
            let mut headings = target.lines().filter(|line| line.starts_with('#'));
            let is_there = headings.any(|line| anchor(line.trim_start_matches('#')) == heading);
            assert!(is_there, "{}: {link} has no such heading", page.display());
        }
    }
}
