//! Keys of a file that the schema does not have.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::aliases::{is_alias, meant, section_of_alias};
use super::did_you_mean::did_you_mean;
use super::keys::{keys, sections};
use hpctrain_base::error::{Error, Result};

/// Refuses the first key of `text` that the schema does not have, unless it is an alias of one.
///
/// Keys inside of lists, such as those of `model.layers`, are left to their types.
///
/// # Errors
/// Returns an error that names `origin`, the line, and the nearest key that exists. A text that is
/// not TOML is not an error.
pub(super) fn check(text: &str, origin: &str) -> Result<()> {
    let Ok(table) = DeTable::parse(text) else { return Ok(()) };
    let Some(unknown) = first_unknown(table.get_ref()) else { return Ok(()) };
    let place = place(text, origin, unknown.span.start);
    let Unknown { section, key, known, .. } = unknown;
    let own_name = key.as_deref().or(section.as_deref()).unwrap_or_default();
    let nearest = did_you_mean(own_name, &known);
    // A misspelt section is not one of another program.
    let is_slip =
        key.is_none() && known.iter().any(|section| strsim::levenshtein(own_name, section) <= 2);
    let of_other_programs = match &key {
        Some(key) => meant(section.as_deref(), key),
        None => unknown.first_key.and_then(|first| meant(section.as_deref(), &first)),
    };
    let meant = of_other_programs
        .filter(|_| !is_slip)
        .map_or(nearest, |ours| format!("did you mean `{ours}`? "));
    Err(Error::input(format!("{place}: unknown key `{own_name}`"))
        .hint(format!("{meant}keys here are {}", known.join(", "))))
}

/// `origin`, with the number of the line at byte `at` where the text has several.
pub(super) fn place(text: &str, origin: &str, at: usize) -> String {
    // An override has one line; its text is in the origin already.
    if text.lines().count() <= 1 {
        return origin.to_owned();
    }
    let line = text[..at.min(text.len())].matches('\n').count() + 1;
    format!("{origin}:{line}")
}

/// A key that the schema does not have.
struct Unknown {
    /// Bytes of the file.
    span: Range<usize>,
    /// The section in which it is, or which is unknown itself.
    section: Option<String>,
    /// The name of the key. `None`: the section is unknown.
    key: Option<String>,
    /// The first key of an unknown section.
    first_key: Option<String>,
    /// Names that are known in its place.
    known: Vec<&'static str>,
}

/// Returns the unknown key that comes first in the file.
fn first_unknown(file: &DeTable<'_>) -> Option<Unknown> {
    let mut unknown = Vec::new();
    for (name, value) in file {
        let section = section_of_alias(name.get_ref());
        match value.get_ref() {
            _ if keys(section).is_none() => unknown.push(Unknown {
                span: name.span(),
                section: Some(section.to_owned()),
                key: None,
                first_key: first_key(value),
                known: sections().map(|key| key.name).collect(),
            }),
            DeValue::Table(table) => check_section(section, table, &mut unknown),
            // Its type is refused later.
            _ => {}
        }
    }
    unknown.into_iter().min_by_key(|unknown| unknown.span.start)
}

/// Adds the unknown keys of a section, and of the sections in it.
fn check_section(section: &str, table: &DeTable<'_>, unknown: &mut Vec<Unknown>) {
    let known: Vec<&'static str> = keys(section)
        .unwrap_or_default()
        .iter()
        .filter(|key| key.is_in_files())
        .map(|key| key.name)
        .collect();
    for (name, value) in table {
        let key = name.get_ref();
        if !known.contains(&&key[..]) {
            if !is_alias(section, key) {
                unknown.push(Unknown {
                    span: name.span(),
                    section: Some(section.to_owned()),
                    key: Some(key.to_string()),
                    first_key: None,
                    known: known.clone(),
                });
            }
            continue;
        }
        let inner = format!("{section}.{key}");
        if let (Some(_), DeValue::Table(table)) = (keys(&inner), value.get_ref()) {
            check_section(&inner, table, unknown);
        }
    }
}

/// Returns the key of a table that comes first in the file.
fn first_key(value: &Spanned<DeValue<'_>>) -> Option<String> {
    let table = value.get_ref().as_table()?;
    let first = table.keys().min_by_key(|key| key.span().start)?;
    Some(first.get_ref().to_string())
}
