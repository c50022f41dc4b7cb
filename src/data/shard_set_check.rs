//! Checks that all shards of an import are present, so that training on a part of them is never an
//! accident.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::import::shard_name;
use super::shard::Shard;
use super::spec::Split;

/// The largest number of missing shards that are named.
const NAMED: usize = 5;

/// The shards of one split of an import, as each of them records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Import<'a> {
    split: &'a str,
    source: &'a str,
    sha256: &'a str,
    name: &'a str,
    num_shards: u64,
}

impl<'a> Import<'a> {
    /// Returns the import of a shard and its number there; `None` if the shard does not record
    /// them.
    fn from_shard(shard: &'a Shard) -> Option<(Self, u64)> {
        let header = &shard.header;
        let text = |text: &'a Option<String>| text.as_deref().unwrap_or_default();
        let import = Self {
            split: text(&header.split),
            source: text(&header.source),
            sha256: text(&header.source_sha256),
            name: text(&header.import),
            num_shards: header.num_shards?,
        };
        Some((import, header.shard?))
    }

    /// Returns the file name of shard `number`, formed like the name of `other`, another shard of
    /// the import.
    fn file(&self, number: u64, (of_other, other): (&str, u64)) -> String {
        let digits = |number: u64| format!("{number:05}");
        match of_other.rsplit_once(&digits(other)) {
            Some((before, after)) => format!("{before}{}{after}", digits(number)),
            None if self.split == Split::Validation.name() => shard_name(Split::Validation, number),
            None => shard_name(Split::Train, number),
        }
    }
}

impl fmt::Display for Import<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { split, source, num_shards, .. } = self;
        match *num_shards {
            1 => write!(f, "the only {split} shard")?,
            n => write!(f, "the {n} {split} shards")?,
        }
        if source.is_empty() { Ok(()) } else { write!(f, " of {source}") }
    }
}

/// Lists the problems of the shards of a directory: two with the same number, numbers that are out
/// of range, and missing ones whose names are `wanted`. Problems of the first import come first.
/// Shards that do not record their import are ignored.
pub(super) fn problems(shards: &[Shard], wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let file_name =
        |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut imports: BTreeMap<Import<'_>, BTreeMap<u64, Vec<String>>> = BTreeMap::new();
    for shard in shards {
        if let Some((import, number)) = Import::from_shard(shard) {
            imports
                .entry(import)
                .or_default()
                .entry(number)
                .or_default()
                .push(file_name(&shard.path));
        }
    }
    let mut problems = Vec::new();
    for (import, numbers) in &imports {
        for (number, files) in numbers {
            if *number >= import.num_shards {
                problems.push(format!(
                    "{} says it is number {number} of {import}, counted from 0",
                    files[0]
                ));
            } else if files.len() > 1 {
                problems
                    .push(format!("{} are both number {number} of {import}", files.join(" and ")));
            }
        }
        let Some((first, files)) = numbers.first_key_value() else { continue };
        let missing = (0..import.num_shards).filter(|number| !numbers.contains_key(number));
        let missing = missing.map(|number| (number, import.file(number, (&files[0], *first))));
        let mut absent = Vec::new();
        for (number, name) in missing.filter(|(_, name)| wanted(name)) {
            match shards.iter().find(|shard| file_name(&shard.path) == name).map(Import::from_shard)
            {
                None => absent.push(name),
                // Perhaps a duplicate of another shard, which was reported above.
                Some(Some((other, own))) if other == *import => match numbers.get(&own) {
                    Some(files) if files.len() > 1 => {}
                    _ => problems
                        .push(format!("{name} is number {own} and not {number} of {import}")),
                },
                Some(_) => problems
                    .push(format!("{name} is of another import, not number {number} of {import}")),
            }
        }
        if !absent.is_empty() {
            let more = absent.len().saturating_sub(NAMED);
            let verb = if absent.len() == 1 { "is" } else { "are" };
            let mut named = absent[..absent.len() - more].join(", ");
            if more > 0 {
                named += &format!(" and {more} more");
            }
            problems.push(format!("{named} {verb} missing of {import}"));
        }
    }
    problems
}
