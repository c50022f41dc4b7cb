//! Checkpoints: manifests, and the files of ranks.

use std::path::Path;

use hpctrain::checkpoint::export::onnx::{OnnxOptions, onnx};
use hpctrain::checkpoint::tools::{describe, diff, list, verify};
use hpctrain::checkpoint::{Checkpoints, Reader, export, huggingface};

use super::harness::{Terms, fuzz, fuzz_on};
use super::mutate::Form;
use super::samples::sample;
use hpctrain_testkit::runs::copy;

fn seal(text: &[u8]) -> String {
    format!("{:08x}  manifest.json\n", crc32fast::hash(text))
}

/// Does everything with a checkpoint in `dir` that the program does, except training.
fn look(dir: &Path, checkpoints: &Checkpoints) -> bool {
    list::list(checkpoints).unwrap();
    let opened = Reader::open(dir);
    let damaged = verify::verify(dir, &mut |_| ()).damaged;
    let Ok(mut reader) = opened else { return false };
    let text = describe::describe(dir, reader.manifest());
    assert!(!text.contains('\u{1b}'), "{text:?}");
    let first = reader
        .manifest()
        .tensors
        .iter()
        .next()
        .map(|(name, entry)| (name.clone(), entry.shape.clone()));
    if let Some((name, shape)) = first
        && let Some(len) = shape.iter().try_fold(1usize, |len, extent| len.checked_mul(*extent))
        && len < 1 << 20
    {
        let _ = reader.read(&name, 0, None, 0..len, &mut vec![0.0; len]);
    }
    let mut original = Reader::open(&sample().run.checkpoint(4)).unwrap();
    let _ = diff::diff(&mut reader, &mut original, false, &mut |_| ());
    let out = dir.with_file_name("out");
    let _ = huggingface::export(&mut reader, &out);
    let _ = std::fs::remove_dir_all(&out);
    let _ = export::safetensors(&mut reader, &out);
    let _ = std::fs::remove_dir_all(&out);
    let _ = onnx(&mut reader, &out, OnnxOptions::default());
    let _ = std::fs::remove_dir_all(out);
    damaged == 0
}

#[test]
fn manifests_are_read() {
    let root = tempfile::tempdir().unwrap();
    copy(&sample().run.path("checkpoints"), root.path());
    let checkpoints = Checkpoints::new(root.path().join("checkpoints"));
    let dir = checkpoints.path(4);
    let seed = std::fs::read(dir.join("manifest.json")).unwrap();
    let broken = seal(b"");
    let mut number = 0u64;
    fuzz_on(Terms::one_of(2), "manifest", Form::Json, &[seed], |input| {
        number += 1;
        std::fs::write(dir.join("manifest.json"), input).unwrap();
        // Mostly with a seal that matches, as an attacker would write it.
        let is_sealed = !number.is_multiple_of(8);
        std::fs::write(
            dir.join("manifest.crc32"),
            if is_sealed { seal(input) } else { broken.clone() },
        )
        .unwrap();
        look(&dir, &checkpoints)
    });
    let seed = seal(&std::fs::read(sample().run.checkpoint(4).join("manifest.json")).unwrap());
    copy(&sample().run.path("checkpoints"), root.path());
    fuzz_on(Terms::one_of(2), "seal", Form::Bytes, &[seed.clone().into_bytes()], |input| {
        std::fs::write(dir.join("manifest.crc32"), input).unwrap();
        let taken = Reader::open(&dir).is_ok();
        assert_eq!(taken, input == seed.as_bytes());
        taken
    });
}

/// Every byte of a file is covered by a checksum: no change of any is accepted.
#[test]
fn files_of_ranks_are_read() {
    let root = tempfile::tempdir().unwrap();
    copy(&sample().run.path("checkpoints"), root.path());
    let checkpoints = Checkpoints::new(root.path().join("checkpoints"));
    let dir = checkpoints.path(4);
    let seed = std::fs::read(dir.join("rank-00000.h5")).unwrap();
    fuzz("rank file", Form::Bytes, std::slice::from_ref(&seed), |input| {
        std::fs::write(dir.join("rank-00000.h5"), input).unwrap();
        let taken = look(&dir, &checkpoints);
        assert_eq!(taken, input == seed, "a change is not noticed");
        taken
    });
}
