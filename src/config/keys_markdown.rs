//! The page docs/configuration.md.

use std::fmt::Write as _;

use toml::{Table, Value};

use super::Config;
use super::keys::{keys, sections};
use super::schema::Key;
use hpctrain_base::error::Result;

/// Returns docs/configuration.md: an introduction, and a table of keys for each section.
///
/// # Errors
/// Returns an error if the defaults cannot be serialized.
pub fn keys_markdown() -> Result<String> {
    let defaults = Config::default().to_table()?;
    let mut page = include_str!("keys_intro.md").to_owned();
    for section in sections() {
        let Some(Value::Table(defaults)) = defaults.get(section.name) else { continue };
        add_section(&mut page, section.name, section, defaults);
    }
    Ok(page)
}

/// Appends the table of a section, and those of the sections in it.
fn add_section(page: &mut String, name: &str, section: &Key, defaults: &Table) {
    let heading = if name.contains('.') { "###" } else { "##" };
    // Writing to a string does not fail.
    let about = sentence(section);
    // The heading has the name already.
    let about = about.strip_prefix(&format!("`[{name}]`, ")).unwrap_or(&about);
    let first = about.chars().next().map(|letter| letter.to_uppercase().to_string());
    let rest = about.get(1..).unwrap_or_default();
    let _ = writeln!(page, "\n{heading} `[{name}]`\n\n{}{rest}\n", first.unwrap_or_default());
    page.push_str("| key | default | meaning |\n|---|---|---|\n");
    let mut inside = Vec::new();
    for key in keys(name).unwrap_or_default().iter().filter(|key| key.is_in_files()) {
        let default = match defaults.get(key.name) {
            Some(Value::Table(defaults)) if keys(&format!("{name}.{}", key.name)).is_some() => {
                inside.push((key, defaults));
                continue;
            }
            Some(Value::Table(defaults)) => format!("`{}`", inline(defaults)),
            Some(value) => format!("`{value}`"),
            None => String::new(),
        };
        let _ = writeln!(page, "| `{}` | {default} | {} |", key.name, sentence(key));
    }
    for (key, defaults) in inside {
        add_section(page, &format!("{name}.{}", key.name), key, defaults);
    }
}

/// Returns the explanation of a key on one line, as a cell of a table.
fn sentence(key: &Key) -> String {
    let lines: Vec<&str> = key.text.iter().map(|line| line.trim()).collect();
    lines.join(" ").replace('|', "\\|")
}

/// Returns a table in TOML's inline form.
fn inline(table: &Table) -> String {
    let pairs: Vec<String> = table.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    format!("{{ {} }}", pairs.join(", "))
}
