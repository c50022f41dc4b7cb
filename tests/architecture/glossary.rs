//! The glossary of docs/architecture.md, which is made from `docs/glossary.tsv`.

use std::path::Path;

/// Terms of the field that a reader looks for: each begins a row of the glossary.
const STANDARD_TERMS: [&str; 35] = [
    "activation checkpointing",
    "all-gather",
    "chunked cross-entropy",
    "CPU offload",
    "CUDA-aware MPI (GPUDirect RDMA)",
    "custom (user-defined)",
    "deferred wgrad",
    "embedding offload",
    "embedding tables",
    "flight recorder",
    "fp32 master weights",
    "FSDP unit",
    "generated sample",
    "hang (deadlock)",
    "host-staged",
    "HTML report",
    "im2col",
    "KV cache",
    "layer-list (sequential) model",
    "Local SGD, DiLoCo",
    "matmul (GEMM)",
    "micro-batch",
    "planner (auto-parallel search)",
    "point-to-point (P2P)",
    "probe",
    "run summary",
    "saved activations",
    "scalars",
    "sequence parallelism (SP)",
    "silent-data-corruption (SDC) check",
    "tensor parallelism (TP)",
    "tied-weight replica (embedding group)",
    "vendor collectives",
    "virtual rank",
    "virtual tensor-parallel rank",
];

/// Rows of the file: term, meaning, and where it is.
fn rows() -> Vec<[String; 3]> {
    let text = read("docs/glossary.tsv");
    let row = |line: &str| {
        let row: Vec<String> = line.split('\t').map(str::to_owned).collect();
        row.try_into().unwrap_or_else(|row| panic!("docs/glossary.tsv: not three columns: {row:?}"))
    };
    text.lines().map(row).collect()
}

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

#[test]
fn every_standard_term_has_a_row() {
    let rows = rows();
    for term in STANDARD_TERMS {
        assert!(rows.iter().any(|[of_row, ..]| of_row.starts_with(term)), "{term}");
    }
    let keys: Vec<String> = rows.iter().map(|[term, ..]| term.to_lowercase()).collect();
    assert!(keys.is_sorted(), "docs/glossary.tsv is not sorted");
}

#[test]
fn files_in_the_glossary_exist() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for [term, _, place] in rows() {
        for path in place.split('`').skip(1).step_by(2).filter(|path| path.contains('/')) {
            assert!(sources.join(path).exists(), "{term}: src/{path}");
        }
    }
}

#[test]
fn the_glossary_is_made_from_its_file() {
    let mut table = String::from("| term | meaning | see |\n|---|---|---|\n");
    for [term, meaning, place] in rows() {
        table += &format!("| {term} | {meaning} | {place} |\n");
    }
    let page = read("docs/architecture.md");
    let (_, glossary) = page.split_once("## Glossary\n\n").unwrap();
    let glossary = glossary.split("\n\n").next().unwrap();
    assert!(
        glossary == table.trim_end(),
        "docs/architecture.md: the glossary differs from docs/glossary.tsv; replace it by\n{table}"
    );
}
