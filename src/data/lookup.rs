//! Look-up of the ids of values: strings become rows of an embedding table.

use std::collections::HashMap;
use std::path::Path;

use super::columns::{Coding, UNKNOWN};
use hpctrain_base::error::{Error, Result};
use hpctrain_base::safe_open;

/// The ids of values, as the layers `StringLookup` and `Hashing` of Keras assign them. Id 0 stands
/// for an empty value.
///
/// Without OOV (out-of-vocabulary) ids, the listed values have ids from 1 on, and id 0 also stands
/// for a value that is not listed. With N of them, such a value has one of the ids 1 to N by its
/// CRC-32, and the listed values have ids from N + 1 on.
///
/// ```
/// use hpctrain_data::{Lookup, LookupOptions};
///
/// let devices = Lookup::new(["pc", "phone"])?.with_oov(2);
/// assert_eq!((devices.id("pc"), devices.id("phone"), devices.id("")), (3, 4, 0));
/// // Unknown values share two ids.
/// assert!(devices.get("radio").is_none() && (1..=2).contains(&devices.id("radio")));
/// // An embedding table needs this number of rows.
/// assert_eq!(devices.ids(), 5);
///
/// // The vocabulary of some data: the values that occur twice or more, the most frequent first.
/// let options = LookupOptions { min_count: 2, ..LookupOptions::default() };
/// let cities = Lookup::adapt(["Oslo", "Rome", "Bonn", "Rome", "Oslo", "Rome"], &options)?;
/// assert_eq!(["Rome", "Oslo", "Bonn"].map(|city| cities.id(city)), [1, 2, 0]);
/// assert_eq!(cities.value(2), Some("Oslo"));
/// # Ok::<(), hpctrain_base::error::Error>(())
/// ```
///
/// A [`Source`](super::Source) looks up the ids of its samples:
///
/// ```
/// use hpctrain_base::error::Result;
/// use hpctrain_data::{Lookup, SampleMut, SampleSizes, Source};
///
/// /// The devices of clicks, and whether each bought something.
/// struct Clicks {
///     devices: Lookup,
///     rows: Vec<(&'static str, bool)>,
/// }
///
/// impl Source for Clicks {
///     fn samples(&self) -> u64 {
///         self.rows.len() as u64
///     }
///
///     fn sizes(&self) -> SampleSizes {
///         SampleSizes { ids: 1, classes: 1, ..SampleSizes::default() }
///     }
///
///     fn read(&mut self, sample: u64, into: SampleMut<'_>) -> Result<()> {
///         let (device, bought) = self.rows[sample as usize];
///         into.ids[0] = self.devices.id(device);
///         into.classes[0] = u32::from(bought);
///         Ok(())
///     }
/// }
///
/// let devices = Lookup::new(["pc", "phone"])?.with_oov(1);
/// let mut clicks = Clicks { devices, rows: vec![("phone", true), ("watch", false)] };
/// let mut ids = [0; 2];
/// let mut classes = [0; 2];
/// clicks.read_run(
///     0,
///     2,
///     0,
///     SampleMut { ids: &mut ids, classes: &mut classes, ..SampleMut::default() },
/// )?;
/// assert_eq!((ids, classes), ([3, 1], [1, 0]));
/// # Ok::<(), hpctrain_base::error::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookup {
    coding: Coding,
    /// The position of each listed value.
    places: HashMap<String, u32>,
}

/// The choice of the values that get ids, and the number of ids of all others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LookupOptions {
    /// Values that occur less often get no ids. If it is more than 1, or if `max_ids` is given, the
    /// most frequent value has the first id; otherwise ids are in order of appearance.
    pub min_count: u64,
    /// The largest number of ids, including id 0 and the OOV ids: the most frequent values get ids,
    /// of equally frequent ones those that appear first.
    pub max_ids: Option<u32>,
    /// The number of OOV ids. If it is 0, a value without an id has id 0, as an empty one.
    pub oov: u32,
}

impl Default for LookupOptions {
    fn default() -> Self {
        Self::ALL
    }
}

impl LookupOptions {
    /// Every value gets an id, in order of appearance.
    pub const ALL: Self = Self { min_count: 1, max_ids: None, oov: 0 };

    /// Returns an error unless there is an id for at least one value.
    pub(super) fn check(&self) -> Result<()> {
        let Self { max_ids, oov, .. } = *self;
        if oov >= MOST {
            return Err(Error::input(format!("{oov} ids for unknown values"))
                .hint(format!("ids are below {MOST}: give a smaller --oov")));
        }
        match max_ids {
            Some(most) if most < oov + 2 => {
                let least = oov + 2;
                Err(Error::input(format!("at most {most} ids, of which none is for a value"))
                    .hint(format!("id 0 stands for empty values, and {oov} ids for unknown ones: give --max-ids {least} or more")))
            }
            _ => Ok(()),
        }
    }

    /// Returns whether values are chosen and ordered by how often they occur.
    fn is_by_count(&self) -> bool {
        self.min_count > 1 || self.max_ids.is_some()
    }
}

/// Ids are counted with 31 bits.
const MOST: u32 = i32::MAX as u32;

impl Lookup {
    /// Creates the ids of these values, in their order, without OOV ids.
    ///
    /// # Errors
    /// Returns an error if a value is empty, or if one occurs twice.
    pub fn new<V: Into<String>>(values: impl IntoIterator<Item = V>) -> Result<Self> {
        Self::listed(values.into_iter().map(Into::into).collect(), "value")
    }

    /// Creates the ids of these values; errors number them as `noun`s.
    fn listed(values: Vec<String>, noun: &str) -> Result<Self> {
        let mut places = HashMap::with_capacity(values.len());
        for (value, place) in values.iter().zip(0..) {
            if value.is_empty() {
                return Err(Error::input(format!("{noun} {} is empty", place + 1))
                    .hint("omit it: id 0 stands for empty values"));
            }
            if let Some(first) = places.insert(value.clone(), place) {
                return Err(Error::input(format!(
                    "{noun}s {} and {} are both {value:?}",
                    first + 1,
                    place + 1
                ))
                .hint("list each value once"));
            }
        }
        Ok(Self { coding: Coding::Values(values), places })
    }

    /// Returns the same listed values with `oov` ids for values that are not listed. Has no effect
    /// on hashed ids.
    #[must_use]
    pub fn with_oov(self, oov: u32) -> Self {
        let coding = match self.coding {
            Coding::Values(values) | Coding::Oov { values, .. } if oov == 0 => {
                Coding::Values(values)
            }
            Coding::Values(values) | Coding::Oov { values, .. } => Coding::Oov { ids: oov, values },
            hash @ Coding::Hash(_) => hash,
        };
        Self { coding, ..self }
    }

    /// Creates the ids of any values by their CRC-32, `ids` of them including id 0.
    ///
    /// # Errors
    /// Returns an error if `ids` is less than 2.
    pub fn hashed(ids: u32) -> Result<Self> {
        match ids {
            0 | 1 => Err(Error::input(format!("values hashed to {ids} ids"))
                .hint("give 2 or more: id 0 stands for empty values")),
            ids => Ok(Self::from_coding(Coding::Hash(ids))),
        }
    }

    /// Creates the ids of the values of some data.
    ///
    /// # Errors
    /// Returns an error if `options` leaves no id for a value.
    pub fn adapt<V: AsRef<str>>(
        values: impl IntoIterator<Item = V>,
        options: &LookupOptions,
    ) -> Result<Self> {
        let mut counts = ValueCounts::default();
        for value in values {
            if !value.as_ref().is_empty() {
                counts.add(value.as_ref());
            }
        }
        counts.lookup(options)
    }

    /// Reads a vocabulary: a text file with a value in each line. Spaces around a value do not
    /// belong to it.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, is not UTF-8, has no values, or has an empty
    /// line or the same value twice.
    pub fn read(path: &Path) -> Result<Self> {
        let place = path.display();
        let bytes = safe_open::read(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::input(format!("{place} does not exist"))
                .hint("give a text file with a value in each line"),
            _ => Error::io("read", path, e),
        })?;
        let text = str::from_utf8(&bytes).map_err(|e| {
            Error::input(format!("{place} is not UTF-8: {e}"))
                .hint("convert it: iconv -f latin1 -t utf-8 OLD > NEW")
        })?;
        let lines = text.strip_prefix('\u{feff}').unwrap_or(text).lines().map(str::trim);
        if lines.clone().next().is_none() {
            return Err(
                Error::input(format!("{place} is empty")).hint("write a value in each line")
            );
        }
        Self::listed(lines.map(str::to_owned).collect(), "line").map_err(|e| e.at(place))
    }

    /// Creates the look-up of a recorded mapping.
    pub fn from_coding(coding: Coding) -> Self {
        let places = match &coding {
            Coding::Values(values) | Coding::Oov { values, .. } => {
                values.iter().cloned().zip(0..).collect()
            }
            Coding::Hash(_) => HashMap::new(),
        };
        Self { coding, places }
    }

    /// Returns the mapping as shards and checkpoints record it.
    pub fn coding(&self) -> &Coding {
        &self.coding
    }

    /// Returns the id of a value.
    pub fn id(&self, value: &str) -> u32 {
        self.get(value).unwrap_or_else(|| self.oov_id(value))
    }

    /// Returns the id of a value, or `None` if the value is unknown. Empty values, and all values
    /// if ids are hashed, are known.
    pub fn get(&self, value: &str) -> Option<u32> {
        match &self.coding {
            _ if value.is_empty() => Some(UNKNOWN),
            Coding::Hash(ids) => {
                Some(1 + crc32fast::hash(value.as_bytes()) % ids.saturating_sub(1).max(1))
            }
            Coding::Values(_) | Coding::Oov { .. } => {
                self.places.get(value).map(|place| self.first().saturating_add(*place))
            }
        }
    }

    /// Returns the id of a value that is not listed.
    pub(super) fn oov_id(&self, value: &str) -> u32 {
        match &self.coding {
            Coding::Oov { ids, .. } => 1 + crc32fast::hash(value.as_bytes()) % (*ids).max(1),
            Coding::Values(_) | Coding::Hash(_) => UNKNOWN,
        }
    }

    /// Returns the listed value with this id, if there is one.
    pub fn value(&self, id: u32) -> Option<&str> {
        let place = id.checked_sub(self.first())?;
        self.coding.values().get(place as usize).map(String::as_str)
    }

    /// Returns the number of ids, which is the number of rows of the embedding table.
    pub fn ids(&self) -> usize {
        self.coding.ids()
    }

    /// Returns the id of the first listed value.
    fn first(&self) -> u32 {
        self.coding.ids() as u32 - self.coding.values().len() as u32
    }
}

/// Values in order of appearance, with the number of times that each occurs.
#[derive(Debug, Default)]
pub(super) struct ValueCounts {
    places: HashMap<String, u32>,
    values: Vec<String>,
    counts: Vec<u64>,
}

impl ValueCounts {
    /// Counts a value, and returns its position in order of appearance.
    pub fn add(&mut self, value: &str) -> u32 {
        let place = match self.places.get(value) {
            Some(place) => *place,
            None => {
                let place = self.values.len() as u32;
                self.places.insert(value.to_owned(), place);
                self.values.push(value.to_owned());
                self.counts.push(0);
                place
            }
        };
        self.counts[place as usize] += 1;
        place
    }

    /// Returns the values in order of appearance.
    pub fn values(&self) -> &[String] {
        &self.values
    }

    /// Returns how often the values occur, in order of appearance.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Returns the ids that `options` gives the values.
    pub fn lookup(&self, options: &LookupOptions) -> Result<Lookup> {
        options.check()?;
        if !options.is_by_count() {
            return Ok(Lookup::new(self.values.iter().cloned())?.with_oov(options.oov));
        }
        let count = |place: &usize| self.counts[*place];
        let mut order: Vec<usize> = (0..self.values.len()).collect();
        order.retain(|place| count(place) >= options.min_count);
        // The sort is stable: equally frequent values stay in order of appearance.
        order.sort_by_key(|place| std::cmp::Reverse(count(place)));
        if let Some(most) = options.max_ids {
            order.truncate((most - 1 - options.oov) as usize);
        }
        let most = self.counts.iter().copied().max().unwrap_or(0);
        if order.is_empty() && most > 0 {
            return Err(Error::input(format!("no value occurs {} times", options.min_count)).hint(
                format!(
                    "the most frequent one occurs {most} times: give --min-count {most} or less"
                ),
            ));
        }
        let values = order.into_iter().map(|place| self.values[place].clone());
        Ok(Lookup::new(values)?.with_oov(options.oov))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> Result<Lookup> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words.txt");
        std::fs::write(&path, text).unwrap();
        Lookup::read(&path)
    }

    #[test]
    fn values_have_ids_in_their_order() {
        let lookup = Lookup::new(["b", "a"]).unwrap();
        assert_eq!(["b", "a", "", "c"].map(|value| lookup.id(value)), [1, 2, 0, 0]);
        assert_eq!((lookup.ids(), lookup.value(2), lookup.value(0)), (3, Some("a"), None));
        assert_eq!((lookup.get("c"), lookup.get("")), (None, Some(0)));
        assert_eq!(Lookup::from_coding(lookup.coding().clone()), lookup);
        // Empty values do not share an id with unknown ones if there are OOV ids.
        let lookup = lookup.with_oov(3);
        assert_eq!((lookup.id("b"), lookup.id("a"), lookup.id(""), lookup.ids()), (4, 5, 0, 6));
        let ids: Vec<u32> = (0..100).map(|i| lookup.id(&i.to_string())).collect();
        assert!((1..4).all(|id| ids.contains(&id)) && ids.iter().all(|id| (1..4).contains(id)));
        assert_eq!((lookup.value(3), lookup.value(4)), (None, Some("b")));
        assert_eq!(Lookup::from_coding(lookup.coding().clone()), lookup);
        assert_eq!(lookup.with_oov(0), Lookup::new(["b", "a"]).unwrap());
        for (values, wanted) in [
            (["x", ""], "value 2 is empty\nhint: omit it"),
            (["x", "x"], "values 1 and 2 are both \"x\"\nhint: list each"),
        ] {
            assert!(Lookup::new(values).unwrap_err().to_string().contains(wanted));
        }
    }

    #[test]
    fn hashes_stay_below_their_number() {
        let lookup = Lookup::hashed(3).unwrap();
        let ids: Vec<u32> = (0..100).map(|i| lookup.id(&i.to_string())).collect();
        assert!(ids.iter().all(|id| (1..3).contains(id)) && ids.contains(&1) && ids.contains(&2));
        assert_eq!((lookup.id(""), lookup.ids(), lookup.get("x").is_some()), (0, 3, true));
        assert!(Lookup::hashed(1).is_err());
    }

    #[test]
    fn frequent_values_are_chosen() {
        let text = ["d", "b", "a", "c", "a", "b", "", "a", "c"];
        let ids = |min_count, max_ids, oov| {
            let options = LookupOptions { min_count, max_ids, oov };
            let lookup = Lookup::adapt(text, &options)?;
            Ok::<_, Error>(["a", "b", "c", "d", ""].map(|value| lookup.get(value)))
        };
        // In order of appearance, unless a limit is given; ties are in that order.
        assert_eq!(ids(1, None, 0).unwrap(), [Some(3), Some(2), Some(4), Some(1), Some(0)]);
        assert_eq!(ids(2, None, 0).unwrap(), [Some(1), Some(2), Some(3), None, Some(0)]);
        assert_eq!(ids(1, Some(3), 0).unwrap(), [Some(1), Some(2), None, None, Some(0)]);
        assert_eq!(ids(1, Some(4), 2).unwrap(), [Some(3), None, None, None, Some(0)]);
        assert_eq!(ids(1, Some(9), 0).unwrap(), [Some(1), Some(2), Some(3), Some(4), Some(0)]);
        for (min_count, max_ids, oov, wanted) in [
            (1, Some(3), 2, "at most 3 ids, of which none is for a value\nhint: id 0 stands for"),
            (4, None, 0, "no value occurs 4 times\nhint: the most frequent one occurs 3 times"),
            (1, None, u32::MAX, "4294967295 ids for unknown values\nhint: "),
        ] {
            let error = ids(min_count, max_ids, oov).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
        assert!(Lookup::adapt([""; 0], &LookupOptions::default()).is_ok());
    }

    #[test]
    fn vocabularies_are_read_line_by_line() {
        let wanted = Lookup::new(["red", "dark blue"]).unwrap();
        for text in ["red\ndark blue\n", "red\r\ndark blue", "\u{feff} red \ndark blue\n"] {
            assert_eq!(read(text.as_bytes()).unwrap(), wanted, "{text:?}");
        }
        for (text, wanted) in [
            (&b"a\n\nb\n"[..], "words.txt: line 2 is empty\nhint: omit it"),
            (b"a\nb\na\n", "words.txt: lines 1 and 3 are both \"a\"\nhint: "),
            (b"", "words.txt is empty\nhint: write a value in each line"),
            (b"a\n\xff\n", "words.txt is not UTF-8"),
        ] {
            let error = read(text).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(wanted), "{error}");
        }
        let error = Lookup::read(Path::new("/nowhere/words.txt")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/words.txt does not exist\nhint: "), "{error}");
    }
}
