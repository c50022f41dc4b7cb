//! Matmul autotuning: chooses the algorithms of a training's matmuls on GPUs by their measured time
//! (`device.matmul_autotune = true`).
//!
//! A warm-up step shows which matmuls the ranks use. For each kind of device, the first rank with
//! one measures the matmuls of all ranks with such a device, unless `matmuls.json` in the run's
//! directory has the choices already. All these ranks then use the same algorithms. So the last
//! bits of a run depend on one measurement: later starts read the file.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::Path;
use std::time::Instant;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::forward_backward::Engine;
use super::warmup::warmup_step;
use hpctrain_base::error::{Error, Result};
use hpctrain_comm::Group;
use hpctrain_config::ResolvedConfig;
use hpctrain_device::{ChosenAlgorithm, Kernels, MatmulAlgorithms, MatmulKey};

/// Choices by kind of device, sorted by matmul.
type Choices = BTreeMap<String, Vec<ChosenAlgorithm>>;

/// The content of `matmuls.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// The checksum of the choices in compact JSON, in hexadecimal.
    crc32: String,
    kinds: Choices,
}

/// The result of autotuning.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct MatmulChoices {
    /// A line for display. Empty if nothing was autotuned.
    pub summary: String,
    /// The new content of `matmuls.json`, on rank 0, if there are new choices.
    pub to_save: Option<String>,
}

/// The matmuls that a rank uses.
#[derive(Serialize, Deserialize)]
struct UsedMatmuls {
    kind: String,
    products: Vec<MatmulKey>,
}

/// The choices for all matmuls on a kind of device.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct DeviceChoices {
    kind: String,
    chosen: Vec<ChosenAlgorithm>,
    /// The number of matmuls that were measured now.
    measured: usize,
    /// The number of matmuls whose earlier choice the library no longer accepts, so that its first
    /// proposal is used instead.
    refused: usize,
}

/// Chooses the algorithms of the matmuls of training steps, if `device.matmul_autotune` is set and
/// the device has a choice. `path` is the file with earlier choices. Nothing else in the training
/// changes. Collective over `world`, which has all ranks.
///
/// # Errors
/// Returns an error if the file cannot be read, or if the device or a message between ranks fails.
pub fn autotune_matmuls<B: Kernels>(
    world: &Group<B>,
    plan: &ResolvedConfig,
    engine: &mut Engine<B>,
    path: &Path,
) -> Result<MatmulChoices> {
    let backend = engine.model.backend.clone();
    let is_enabled = plan.config.device.matmul_autotune;
    let Some(device) = backend.matmul_algorithms().filter(|_| is_enabled) else {
        return Ok(MatmulChoices::default());
    };
    let begun = Instant::now();
    warmup_step(plan, engine)?;

    let root = world.rank() == 0;
    let mine = world.all_ok(if root { recall(path) } else { Ok(Choices::new()) })?;
    let before = exchange(world, &mine)?.swap_remove(0);
    let kind = device.device_and_version();
    let used = exchange(world, &UsedMatmuls { kind: kind.clone(), products: device.seen() })?;
    let is_first = used.iter().position(|one| one.kind == kind) == Some(world.rank());
    let same_kind = used.into_iter().filter(|one| one.kind == kind);
    let matmuls: BTreeSet<MatmulKey> = same_kind.flat_map(|one| one.products).collect();
    let known = before.get(&kind).map_or(&[][..], Vec::as_slice);
    let choices = world
        .with_keepalive(is_first.then_some(|| choose(device, kind.clone(), &matmuls, known)))?;

    let all: Vec<DeviceChoices> = exchange(world, &choices)?.into_iter().flatten().collect();
    let chosen = all.iter().find(|one| one.kind == kind).ok_or_else(|| {
        Error::internal("no rank chose matmul algorithms for this kind of device")
    })?;
    device.choose(&chosen.chosen);
    let refused: usize = all.iter().map(|one| one.refused).sum();
    if root && refused > 0 {
        log::warn!(
            "cuBLASLt no longer accepts {refused} of the algorithms in {}: its first proposals are used, and last bits may differ",
            path.display()
        );
    }
    let line = describe(&all, begun.elapsed().as_secs_f64());
    let now = joined(&before, all);
    let found = (root && now != before).then(|| encode(&now)).transpose()?;
    Ok(MatmulChoices { summary: line, to_save: found })
}

/// Describes the choices in one line.
fn describe(all: &[DeviceChoices], seconds: f64) -> String {
    let chosen = all.iter().flat_map(|one| &one.chosen);
    let (count, others) = (chosen.clone().count(), chosen.filter(|one| one.place > 0).count());
    let how = match all.iter().map(|one| one.measured).sum::<usize>() {
        0 => "measured before".to_string(),
        measured => format!("{measured} measured, {seconds:.1} s"),
    };
    format!("{count} autotuned, {others} of them not cuBLASLt's first proposal ({how})")
}

/// Gathers a value from every rank, on every rank.
fn exchange<B: Kernels, T: Serialize + DeserializeOwned>(
    world: &Group<B>,
    mine: &T,
) -> Result<Vec<T>> {
    let mine =
        serde_json::to_vec(mine).map_err(|e| Error::internal(format!("matmul choices: {e}")))?;
    let messages = world.gather_bytes(mine).wait()?;
    let values = messages
        .iter()
        .map(|bytes| serde_json::from_slice(bytes))
        .collect::<std::result::Result<_, _>>();
    values.map_err(|e| Error::comm(format!("another rank sent malformed matmul choices: {e}")))
}

/// Chooses an algorithm for each matmul that the library has one for: the earlier one if the
/// library still accepts it, else a new one.
fn choose(
    device: &dyn MatmulAlgorithms,
    kind: String,
    matmuls: &BTreeSet<MatmulKey>,
    before: &[ChosenAlgorithm],
) -> Result<DeviceChoices> {
    let mut choices = DeviceChoices { kind, ..DeviceChoices::default() };
    for product in matmuls {
        let chosen = match before.iter().find(|one| one.product == *product) {
            Some(known) if device.accepts(known)? => Some(*known),
            // The first proposal is the same at every start, unlike a measurement.
            Some(_) => device.heuristic(product)?.inspect(|_| choices.refused += 1),
            None => device.measure(product)?.inspect(|_| choices.measured += 1),
        };
        choices.chosen.extend(chosen);
    }
    Ok(choices)
}

/// Returns the earlier choices with the new ones, which replace those for the same matmuls.
fn joined(before: &Choices, new_choices: Vec<DeviceChoices>) -> Choices {
    let mut all = before.clone();
    for DeviceChoices { kind, chosen, .. } in new_choices {
        let of_kind = all.entry(kind).or_default();
        of_kind.retain(|one| chosen.iter().all(|new| new.product != one.product));
        of_kind.extend(chosen);
        of_kind.sort_by_key(|one| one.product);
    }
    all
}

/// Reads the choices of an earlier start. They are empty if there is no file, or if it is damaged.
fn recall(path: &Path) -> Result<Choices> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Choices::new()),
        Err(e) => return Err(Error::io("read", path, e)),
    };
    decode(&bytes).or_else(|why| {
        log::warn!(
            "{} is damaged ({why}): matmuls are measured again, and last bits may differ",
            path.display()
        );
        Ok(Choices::new())
    })
}

fn encode(kinds: &Choices) -> Result<String> {
    let crc32 = checksum(kinds)?;
    let text = serde_json::to_string(&File { crc32, kinds: kinds.clone() });
    text.map(|text| text + "\n").map_err(|e| Error::internal(format!("matmuls.json: {e}")))
}

fn decode(bytes: &[u8]) -> std::result::Result<Choices, String> {
    let File { crc32, kinds } = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    let right = checksum(&kinds).map_err(|e| e.to_string())?;
    if crc32 == right { Ok(kinds) } else { Err("its checksum does not match".into()) }
}

fn checksum(kinds: &Choices) -> Result<String> {
    let text =
        serde_json::to_vec(kinds).map_err(|e| Error::internal(format!("matmuls.json: {e}")))?;
    Ok(format!("{:08x}", crc32fast::hash(&text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_device::MatmulAlgorithm;

    fn product(m: usize) -> MatmulKey {
        MatmulKey {
            sizes: [m, 8, 16],
            strides: [16, 8, 8],
            transposed: [false, true],
            adds: true,
            out_of_place: true,
            epilogue: 4,
            keeps: false,
            bytes: [2, 2, 4],
            tf32: false,
            alignments: [256, 16, 64],
        }
    }

    fn chosen(m: usize, place: usize) -> ChosenAlgorithm {
        ChosenAlgorithm {
            product: product(m),
            algorithm: MatmulAlgorithm([place as u64, 0, 0, 0, 0, 0, 0, u64::MAX]),
            place,
        }
    }

    /// A library that accepts the algorithms with even places, measures the second as the fastest,
    /// and has no algorithm for matmuls of 7 rows.
    struct Library;

    impl MatmulAlgorithms for Library {
        fn device_and_version(&self) -> String {
            "a device".into()
        }

        fn seen(&self) -> Vec<MatmulKey> {
            vec![]
        }

        fn accepts(&self, chosen: &ChosenAlgorithm) -> Result<bool> {
            Ok(chosen.place.is_multiple_of(2))
        }

        fn heuristic(&self, product: &MatmulKey) -> Result<Option<ChosenAlgorithm>> {
            Ok(Some(chosen(product.sizes[0], 0)))
        }

        fn measure(&self, product: &MatmulKey) -> Result<Option<ChosenAlgorithm>> {
            Ok((product.sizes[0] != 7).then(|| chosen(product.sizes[0], 1)))
        }

        fn choose(&self, _: &[ChosenAlgorithm]) {}
    }

    #[test]
    fn earlier_choices_stay_if_the_library_takes_them() {
        let matmuls = BTreeSet::from([1, 2, 3, 7].map(product));
        let before = [chosen(1, 2), chosen(2, 3), chosen(9, 2)];
        let choices = choose(&Library, "a device".into(), &matmuls, &before).unwrap();
        let all = vec![chosen(1, 2), chosen(2, 0), chosen(3, 1)];
        assert_eq!(
            choices,
            DeviceChoices { kind: "a device".into(), chosen: all, measured: 1, refused: 1 }
        );
        assert_eq!(
            describe(&[choices], 1.25),
            "3 autotuned, 2 of them not cuBLASLt's first proposal (1 measured, 1.2 s)"
        );
        let again =
            choose(&Library, "a device".into(), &BTreeSet::from([product(1)]), &before).unwrap();
        assert_eq!(
            describe(&[again], 1.0),
            "1 autotuned, 1 of them not cuBLASLt's first proposal (measured before)"
        );
    }

    #[test]
    fn new_choices_join_those_of_other_matmuls_and_devices() {
        let of_kind = |kind: &str, chosen: Vec<ChosenAlgorithm>| DeviceChoices {
            kind: kind.into(),
            chosen,
            ..DeviceChoices::default()
        };
        let before =
            joined(&Choices::new(), vec![of_kind("old", vec![chosen(1, 2), chosen(5, 1)])]);
        assert_eq!(joined(&before, vec![]), before);
        assert_eq!(joined(&before, vec![of_kind("old", vec![chosen(5, 1)])]), before);
        let new = vec![
            of_kind("old", vec![chosen(3, 0), chosen(1, 3)]),
            of_kind("new", vec![chosen(1, 1)]),
        ];
        let now = joined(&before, new);
        assert_eq!(now["old"], [chosen(1, 3), chosen(3, 0), chosen(5, 1)]);
        assert_eq!(now["new"], [chosen(1, 1)]);
    }

    #[test]
    fn the_file_is_read_back_or_found_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("matmuls.json");
        assert_eq!(recall(&path).unwrap(), Choices::new());
        let choices = Choices::from([
            ("GPU, 12".to_string(), vec![chosen(1, 2), chosen(2, 0)]),
            ("b".into(), vec![]),
        ]);
        let text = encode(&choices).unwrap();
        std::fs::write(&path, &text).unwrap();
        assert_eq!(recall(&path).unwrap(), choices);
        // A change of any digit or letter is detected.
        let bytes = text.trim_end().as_bytes();
        for at in (0..bytes.len()).filter(|at| bytes[*at].is_ascii_alphanumeric()) {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 1;
            assert!(decode(&damaged).is_err(), "{}", String::from_utf8_lossy(&damaged));
        }
        for cut in [0, 1, bytes.len() / 2, bytes.len() - 1] {
            assert!(decode(&bytes[..cut]).is_err());
        }
        std::fs::write(&path, &bytes[1..]).unwrap();
        assert_eq!(recall(&path).unwrap(), Choices::new());
        // A file that cannot be read is not treated as damaged.
        assert!(recall(folder.path()).is_err());
    }
}
