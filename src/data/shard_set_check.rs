//! Whether all shards of an import are there: training on fewer of them is not to be an accident.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use super::import::shard_name;
use super::shard::Shard;
use super::spec::Split;

/// Missing shards that are named, at most.
const NAMED: usize = 5;

/// The shards of one split of an import, as each of them tells of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Import<'a> {
    split: &'a str,
    source: &'a str,
    sha256: &'a str,
    name: &'a str,
    num_shards: u64,
}

impl<'a> Import<'a> {
    /// The import of a shard and its number; none where it does not tell.
    fn of(shard: &'a Shard) -> Option<(Self, u64)> {
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

    /// The file name of shard `number`: as that of `other`, which is another one of them.
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

/// Lists the faults among the shards of a directory, of the first import first: two with one
/// number, numbers that there cannot be, and missing ones, as far as their names are `wanted`.
/// Shards that tell nothing of others count for nothing.
pub(super) fn problems(shards: &[Shard], wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let file_name =
        |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut imports: BTreeMap<Import<'_>, BTreeMap<u64, Vec<String>>> = BTreeMap::new();
    for shard in shards {
        if let Some((import, number)) = Import::of(shard) {
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
            match shards.iter().find(|shard| file_name(&shard.path) == name).map(Import::of) {
                None => absent.push(name),
                // Perhaps the double of another, which has been told.
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
