//! Expansion of paths of the configuration that begin with the home directory or an environment
//! variable, as in a shell.

use toml::{Table, Value};

use hpctrain_base::error::{Error, Result};

/// Keys whose values are paths, by section.
const PATHS: [(&str, &str); 6] = [
    ("run", "root"),
    ("data", "path"),
    ("data", "local_cache"),
    ("data", "exclude"),
    ("memory_checkpoint", "dir"),
    ("memory_checkpoint", "disk_dir"),
];

/// Replaces `~/`, `$NAME` and `${NAME}` at the beginning of paths; `env` looks up a variable.
///
/// # Errors
/// Returns an error if a variable is not set.
pub(super) fn expand_paths(
    config: &mut Table,
    env: &impl Fn(&str) -> Option<String>,
) -> Result<()> {
    for (section, key) in PATHS {
        if let Some(Value::String(path)) =
            config.get_mut(section).and_then(|section| section.get_mut(key))
        {
            *path =
                expanded(path, env).map_err(|e| e.at(format_args!("{section}.{key} = {path}")))?;
        }
    }
    let mix =
        config.get_mut("data").and_then(|data| data.get_mut("mix")).and_then(Value::as_array_mut);
    for part in mix.into_iter().flatten() {
        if let Some(Value::String(path)) = part.get_mut("path") {
            *path =
                expanded(path, env).map_err(|e| e.at(format_args!("data.mix: path = {path}")))?;
        }
    }
    Ok(())
}

fn expanded(path: &str, env: &impl Fn(&str) -> Option<String>) -> Result<String> {
    let (name, rest) = if let Some(rest) =
        path.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with('/'))
    {
        ("HOME", rest)
    } else if let Some((name, rest)) = path.strip_prefix("${").and_then(|path| path.split_once('}'))
    {
        (name, rest)
    } else if let Some(path) = path.strip_prefix('$') {
        path.split_at(
            path.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(path.len()),
        )
    } else {
        return Ok(path.to_owned());
    };
    let value = env(name).filter(|value| !value.is_empty()).ok_or_else(|| {
        Error::input(format!("the environment variable {name:?} is not set"))
            .hint("set it on all ranks, or write the path out; a directory whose name begins with ~ or $ is written ./~ or ./$")
    })?;
    Ok(value + rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the value of an environment variable, if it is set.
    fn variable(name: &str) -> Option<String> {
        match name {
            "HOME" => Some("/home/me".to_owned()),
            "SCRATCH" => Some("/scratch/me".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        }
    }

    #[test]
    fn paths_begin_at_home_or_a_variable() {
        let of = |path: &str| expanded(path, &variable);
        for (path, full) in [
            ("~/runs", "/home/me/runs"),
            ("~", "/home/me"),
            ("$SCRATCH/runs", "/scratch/me/runs"),
            ("${SCRATCH}/runs", "/scratch/me/runs"),
            ("${SCRATCH}-2", "/scratch/me-2"),
            ("runs/~/x", "runs/~/x"),
            ("./~/x", "./~/x"),
            ("a$SCRATCH", "a$SCRATCH"),
            ("~other/x", "~other/x"),
        ] {
            assert_eq!(of(path).unwrap(), full, "{path}");
        }
        for path in ["$NOWHERE/x", "$EMPTY/x", "$/x", "${}/x"] {
            let error = of(path).unwrap_err();
            assert!(
                error.to_string().contains("is not set\nhint: ") && error.exit_code() == 2,
                "{path}: {error}"
            );
        }
    }

    #[test]
    fn only_keys_of_paths_are_expanded() {
        let text = "run = { root = '~/runs', name = '~/x' }\ndata = { mix = [{ path = '$A/x', weight = 1.0 }] }\n";
        let mut table: Table = toml::from_str(text).unwrap();
        expand_paths(&mut table, &|name| Some(format!("/{name}"))).unwrap();
        let text = table.to_string();
        assert!(
            text.contains("/HOME/runs") && text.contains("name = \"~/x\"") && text.contains("/A/x"),
            "{text}"
        );
        let error =
            expand_paths(&mut toml::from_str("data.local_cache = '$B'").unwrap(), &|_| None)
                .unwrap_err();
        assert!(
            error.to_string().starts_with("data.local_cache = $B: the environment variable \"B\""),
            "{error}"
        );
    }
}
