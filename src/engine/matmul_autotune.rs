//! Algorithms of a training's matrix products on GPUs, chosen by their time
//! (`device.matmul_autotune = true`).
//!
//! A rehearsed step shows which products the ranks will ask for. For each kind of device its first
//! rank measures those of all ranks with such a device, unless `matmuls.json` of the run's
//! directory has their choice already; all ranks with it then take the same. So bits depend on a
//! measurement once in the life of a run: its next starts find the file.

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
use hpctrain_device::{Chosen, Kernels, ProductAlgorithms, ProductKind};

/// Choices by kind of device, in order of their products.
type Choices = BTreeMap<String, Vec<Chosen>>;

/// `matmuls.json`.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Of the choices as they are written without spaces, in hexadecimal digits.
    crc32: String,
    kinds: Choices,
}

/// Results of the choice.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct TimedProducts {
    /// A line for people; empty where nothing is chosen by time.
    pub told: String,
    /// On rank 0: the text of `matmuls.json`, where there is something new to be kept.
    pub found: Option<String>,
}

/// The products that a rank has asked its device for.
#[derive(Serialize, Deserialize)]
struct Wanted {
    kind: String,
    products: Vec<ProductKind>,
}

/// The choices for all products on a kind of device.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Settled {
    kind: String,
    chosen: Vec<Chosen>,
    /// How many of them were measured now.
    measured: usize,
    /// How many have the library's best guess in the place of an earlier choice that it does not
    /// take any more.
    refused: usize,
}

/// Chooses the algorithms of the products of a training's steps, if that is asked for and the
/// device has a choice; `path` is the file with earlier choices. Nothing else of the training
/// changes. Collective over `world`, which are all of its ranks.
///
/// # Errors
/// The file cannot be read, the device or a message between ranks failed.
pub fn time_products<B: Kernels>(
    world: &Group<B>,
    plan: &ResolvedConfig,
    engine: &mut Engine<B>,
    path: &Path,
) -> Result<TimedProducts> {
    let backend = engine.model.backend.clone();
    let is_wanted = plan.config.device.matmul_autotune;
    let Some(device) = backend.product_algorithms().filter(|_| is_wanted) else {
        return Ok(TimedProducts::default());
    };
    let begun = Instant::now();
    warmup_step(plan, engine)?;

    let root = world.rank() == 0;
    let mine = world.all_ok(if root { recall(path) } else { Ok(Choices::new()) })?;
    let before = tell(world, &mine)?.swap_remove(0);
    let kind = device.kind();
    let told = tell(world, &Wanted { kind: kind.clone(), products: device.seen() })?;
    let is_first = told.iter().position(|one| one.kind == kind) == Some(world.rank());
    let alike = told.into_iter().filter(|one| one.kind == kind);
    let products: BTreeSet<ProductKind> = alike.flat_map(|one| one.products).collect();
    let known = before.get(&kind).map_or(&[][..], Vec::as_slice);
    let settled = world
        .with_keepalive(is_first.then_some(|| settle(device, kind.clone(), &products, known)))?;

    let all: Vec<Settled> = tell(world, &settled)?.into_iter().flatten().collect();
    let chosen = all
        .iter()
        .find(|one| one.kind == kind)
        .ok_or_else(|| Error::internal("no choice of products"))?;
    device.choose(&chosen.chosen);
    let refused: usize = all.iter().map(|one| one.refused).sum();
    if root && refused > 0 {
        log::warn!(
            "cuBLASLt does not take {refused} of the algorithms in {}: its first ones are taken, and last bits may differ",
            path.display()
        );
    }
    let told = describe(&all, begun.elapsed().as_secs_f64());
    let now = joined(&before, all);
    let found = (root && now != before).then(|| encode(&now)).transpose()?;
    Ok(TimedProducts { told, found })
}

/// A line for people.
fn describe(all: &[Settled], seconds: f64) -> String {
    let chosen = all.iter().flat_map(|one| &one.chosen);
    let (count, others) = (chosen.clone().count(), chosen.filter(|one| one.place > 0).count());
    let how = match all.iter().map(|one| one.measured).sum::<usize>() {
        0 => "measured before".to_string(),
        measured => format!("{measured} measured, {seconds:.1} s"),
    };
    format!("{count} by time, {others} of them not as cuBLASLt proposes first ({how})")
}

/// Every rank's word, on every rank.
fn tell<B: Kernels, T: Serialize + DeserializeOwned>(world: &Group<B>, mine: &T) -> Result<Vec<T>> {
    let mine = serde_json::to_vec(mine).map_err(|e| Error::internal(format!("products: {e}")))?;
    let told = world.gather_bytes(mine).wait()?;
    let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes);
    let told = told.iter().map(read).collect::<std::result::Result<_, _>>();
    told.map_err(|e| Error::comm(format!("another rank sent malformed products: {e}")))
}

/// Choices for all of these products that the library knows an algorithm for: earlier ones that it
/// still takes, or new ones.
fn settle(
    device: &dyn ProductAlgorithms,
    kind: String,
    products: &BTreeSet<ProductKind>,
    before: &[Chosen],
) -> Result<Settled> {
    let mut settled = Settled { kind, ..Settled::default() };
    for product in products {
        let chosen = match before.iter().find(|one| one.product == *product) {
            Some(known) if device.takes(known)? => Some(*known),
            // The same at every start, as a measurement would not be.
            Some(_) => device.guess(product)?.inspect(|_| settled.refused += 1),
            None => device.measure(product)?.inspect(|_| settled.measured += 1),
        };
        settled.chosen.extend(chosen);
    }
    Ok(settled)
}

/// Earlier choices and new ones, which take the place of those for the same products.
fn joined(before: &Choices, settled: Vec<Settled>) -> Choices {
    let mut all = before.clone();
    for Settled { kind, chosen, .. } in settled {
        let of_kind = all.entry(kind).or_default();
        of_kind.retain(|one| chosen.iter().all(|new| new.product != one.product));
        of_kind.extend(chosen);
        of_kind.sort_by_key(|one| one.product);
    }
    all
}

/// The choices of an earlier start; none if there was none, or if what it left is damaged.
fn recall(path: &Path) -> Result<Choices> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Choices::new()),
        Err(e) => return Err(Error::io("read", path, e)),
    };
    decode(&bytes).or_else(|why| {
        log::warn!(
            "{} is damaged ({why}): products are measured anew, and last bits may differ",
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
    if crc32 == right { Ok(kinds) } else { Err("its checksum does not fit".into()) }
}

fn checksum(kinds: &Choices) -> Result<String> {
    let text =
        serde_json::to_vec(kinds).map_err(|e| Error::internal(format!("matmuls.json: {e}")))?;
    Ok(format!("{:08x}", crc32fast::hash(&text)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpctrain_device::Algorithm;

    fn product(m: usize) -> ProductKind {
        ProductKind {
            sizes: [m, 8, 16],
            strides: [16, 8, 8],
            transposed: [false, true],
            adds: true,
            epilogue: 4,
            keeps: false,
            bytes: [2, 2, 4],
            tf32: false,
            alignments: [256, 16, 64],
        }
    }

    fn chosen(m: usize, place: usize) -> Chosen {
        Chosen {
            product: product(m),
            algorithm: Algorithm([place as u64, 0, 0, 0, 0, 0, 0, u64::MAX]),
            place,
        }
    }

    /// A library that takes algorithms of even places, measures the second as the fastest, and
    /// knows no product of 7 rows.
    struct Library;

    impl ProductAlgorithms for Library {
        fn kind(&self) -> String {
            "a device".into()
        }

        fn seen(&self) -> Vec<ProductKind> {
            vec![]
        }

        fn takes(&self, chosen: &Chosen) -> Result<bool> {
            Ok(chosen.place.is_multiple_of(2))
        }

        fn guess(&self, product: &ProductKind) -> Result<Option<Chosen>> {
            Ok(Some(chosen(product.sizes[0], 0)))
        }

        fn measure(&self, product: &ProductKind) -> Result<Option<Chosen>> {
            Ok((product.sizes[0] != 7).then(|| chosen(product.sizes[0], 1)))
        }

        fn choose(&self, _: &[Chosen]) {}
    }

    #[test]
    fn earlier_choices_stay_if_the_library_takes_them() {
        let products = BTreeSet::from([1, 2, 3, 7].map(product));
        let before = [chosen(1, 2), chosen(2, 3), chosen(9, 2)];
        let settled = settle(&Library, "a device".into(), &products, &before).unwrap();
        let all = vec![chosen(1, 2), chosen(2, 0), chosen(3, 1)];
        assert_eq!(
            settled,
            Settled { kind: "a device".into(), chosen: all, measured: 1, refused: 1 }
        );
        assert_eq!(
            describe(&[settled], 1.25),
            "3 by time, 2 of them not as cuBLASLt proposes first (1 measured, 1.2 s)"
        );
        let again =
            settle(&Library, "a device".into(), &BTreeSet::from([product(1)]), &before).unwrap();
        assert_eq!(
            describe(&[again], 1.0),
            "1 by time, 1 of them not as cuBLASLt proposes first (measured before)"
        );
    }

    #[test]
    fn new_choices_join_those_of_other_products_and_devices() {
        let settled = |kind: &str, chosen: Vec<Chosen>| Settled {
            kind: kind.into(),
            chosen,
            ..Settled::default()
        };
        let before =
            joined(&Choices::new(), vec![settled("old", vec![chosen(1, 2), chosen(5, 1)])]);
        assert_eq!(joined(&before, vec![]), before);
        assert_eq!(joined(&before, vec![settled("old", vec![chosen(5, 1)])]), before);
        let new = vec![
            settled("old", vec![chosen(3, 0), chosen(1, 3)]),
            settled("new", vec![chosen(1, 1)]),
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
        // Every digit and letter counts, wherever it stands.
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
        // A file that cannot be read is no damaged one.
        assert!(recall(folder.path()).is_err());
    }
}
