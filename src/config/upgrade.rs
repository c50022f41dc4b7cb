//! Rewrites a configuration file with the present names of keys and values, with its comments.

use toml::Table;
use toml_edit::{DocumentMut, Item, Key, TableLike};

use super::Config;
use super::aliases::{converted, former_section, former_value, same};
use super::load::{internal, parse_layer};
use hpctrain_base::error::{Error, Result};

/// A file with the present names of all keys.
#[derive(Debug, PartialEq, Eq)]
pub struct Upgraded {
    /// Its text.
    pub text: String,
    /// Each section, key or value that had another name, and its present one.
    pub renamed: Vec<(String, String)>,
}

/// Returns the configuration `text` with present names of keys and values, in the same order and with
/// its comments. `origin` is its name in messages.
///
/// # Errors
/// Returns an error if the text is not a configuration that this version reads.
pub fn upgrade(text: &str, origin: &str) -> Result<Upgraded> {
    let meant = parse_layer(text, origin)?;
    let mut document: DocumentMut =
        text.parse().map_err(|e| Error::internal(format!("{origin}: {e}")))?;
    let mut renamed = Vec::new();
    rename_sections(&mut document, &mut renamed);
    let sections: Vec<String> = document.iter().map(|(name, _)| name.to_owned()).collect();
    let mut moved = Vec::new();
    for section in &sections {
        if let Some(table) = document.get_mut(section).and_then(Item::as_table_like_mut) {
            rename_keys(section, table, &mut moved, &mut renamed);
            let is_left = table.is_empty() && moved.iter().any(|(from, ..)| from == section);
            if is_left && !has_comment(&document[section]) {
                document.remove(section);
            }
        }
    }
    for (_, ours, key, item) in moved {
        let (section, name) = ours.split_once('.').unwrap_or((ours, ""));
        let table = document.entry(section).or_insert_with(toml_edit::table);
        let table = table.as_table_like_mut().ok_or_else(|| internal(&section))?;
        table.entry_format(&renamed_key(&key, name)).or_insert(item);
    }
    let text = document.to_string();
    let now = parse_layer(&text, origin)?;
    let config = |table: Table| table.to_string().parse::<Config>().map_err(|e| internal(&e));
    if config(now.table)? != config(meant.table)? || !now.aliases.is_empty() {
        return Err(Error::internal(format!("{origin}: the upgrade would change a value")));
    }
    Ok(Upgraded { text, renamed })
}

/// Returns whether a comment stands before a section.
fn has_comment(section: &Item) -> bool {
    let before = section.as_table().and_then(|table| table.decor().prefix()?.as_str());
    before.is_some_and(|before| before.contains('#'))
}

/// Renames sections, at their places.
fn rename_sections(document: &mut DocumentMut, renamed: &mut Vec<(String, String)>) {
    let names: Vec<String> = document.iter().map(|(name, _)| name.to_owned()).collect();
    for name in names {
        let Some((key, item)) = document.remove_entry(&name) else { continue };
        match former_section(&name) {
            Some(ours) => {
                renamed.push((name, ours.to_owned()));
                document.insert_formatted(&renamed_key(&key, ours), item);
            }
            // All are inserted again, so that their order stays.
            None => drop(document.insert_formatted(&key, item)),
        }
    }
}

/// A key that goes to another section: its section, its present name with the section, and the key
/// with its comments.
type Moved = (String, &'static str, Key, Item);

/// Renames the keys of a section, at their places, and collects those of other sections.
fn rename_keys(
    section: &str,
    table: &mut dyn TableLike,
    moved: &mut Vec<Moved>,
    renamed: &mut Vec<(String, String)>,
) {
    let names: Vec<String> = table.iter().map(|(name, _)| name.to_owned()).collect();
    for name in names {
        let Some(key) = table.key(&name).cloned() else { continue };
        let Some(mut item) = table.remove(&name) else { continue };
        let former = format!("{section}.{name}");
        let Some(ours) = same(section, &name) else {
            upgrade_value(&former, &mut item, renamed);
            table.entry_format(&key).or_insert(item);
            continue;
        };
        renamed.push((former, ours.to_owned()));
        let value = item.as_str().map(|text| converted(ours, text.into()));
        if let Some(toml::Value::Boolean(value)) = value {
            set(&mut item, value.into());
        }
        upgrade_value(ours, &mut item, renamed);
        match ours.split_once('.') {
            Some((to, present)) if to == section => {
                table.entry_format(&renamed_key(&key, present)).or_insert(item);
            }
            _ => moved.push((section.to_owned(), ours, key, item)),
        }
    }
}

/// Replaces a value by its present name.
fn upgrade_value(key: &str, item: &mut Item, renamed: &mut Vec<(String, String)>) {
    if let Some((former, ours)) = item.as_str().and_then(|value| former_value(key, value)) {
        renamed.push((format!("{key} = \"{former}\""), format!("\"{ours}\"")));
        set(item, ours.into());
    }
}

/// Replaces a value, with the comment after it.
fn set(item: &mut Item, mut value: toml_edit::Value) {
    if let Some(before) = item.as_value() {
        *value.decor_mut() = before.decor().clone();
    }
    *item = value.into();
}

/// Returns the key with another name, with the comments before it.
fn renamed_key(key: &Key, name: &str) -> Key {
    Key::new(name)
        .with_leaf_decor(key.leaf_decor().clone())
        .with_dotted_decor(key.dotted_decor().clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_change_and_all_else_stays() {
        let text = "# My run.\n\n[run]\n# Long enough.\nmax_steps = 100 # steps\nseed = 3\n\n\
                    [schedule]\nshape = \"constant\"\n\n[parallel]\nlanes = 8 # for any number of ranks\n\
                    average_every = \"epoch\"\n\n[comm]\nalgorithm = \"tree\" # fast\n";
        let upgraded = upgrade(text, "x.toml").unwrap();
        assert_eq!(
            upgraded.text,
            "# My run.\n\n[run]\n# Long enough.\nsteps = 100 # steps\nseed = 3\n\n\
             [lr_schedule]\nkind = \"constant\"\n\n[parallel]\nvirtual_ranks = 8 # for any number of ranks\n\n\
             [comm]\nalgorithm = \"halving-doubling\" # fast\n\n[local_sgd]\nsync_every = \"epoch\"\n"
        );
        let pairs = |renamed: &[(String, String)]| {
            renamed.iter().map(|(from, to)| format!("{from} {to}")).collect::<Vec<_>>()
        };
        assert_eq!(
            pairs(&upgraded.renamed),
            [
                "schedule lr_schedule",
                "run.max_steps run.steps",
                "lr_schedule.shape lr_schedule.kind",
                "parallel.lanes parallel.virtual_ranks",
                "parallel.average_every local_sgd.sync_every",
                "comm.algorithm = \"tree\" \"halving-doubling\"",
            ]
        );
        let again = upgrade(&upgraded.text, "x.toml").unwrap();
        assert_eq!((again.text, again.renamed), (upgraded.text, vec![]));
    }

    #[test]
    fn other_forms_of_tables_are_upgraded() {
        for (before, after) in [
            ("parallel.lanes = 2\n", "parallel.virtual_ranks = 2\n"),
            ("checkpoint = { asynchronous = true }\n", "checkpoint = { async_save = true }\n"),
            ("[device]\nmatmul = \"timed\"\n", "[device]\nmatmul_autotune = true\n"),
            ("[comm]\npath = \"staged\"\n", "[comm]\ntransport = \"host-staged\"\n"),
            ("[optimizer]\noffload = true\n", "[offload]\noptimizer = true\n"),
            (
                "# Mine.\n[optimizer]\noffload = true\n",
                "# Mine.\n[optimizer]\n\n[offload]\noptimizer = true\n",
            ),
            ("", ""),
        ] {
            assert_eq!(upgrade(before, "x").unwrap().text.trim_start(), after, "{before}");
        }
        let error = upgrade("[run]\nstep = 1\n", "x.toml").unwrap_err().to_string();
        assert!(error.starts_with("x.toml") && error.contains("step"), "{error}");
    }
}
