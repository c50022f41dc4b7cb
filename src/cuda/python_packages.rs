//! Libraries of NVIDIA's Python packages, which the loader does not search.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Folders with a folder of packages for each version of Python, besides those of virtual
/// environments.
const PREFIXES: [&str; 2] = ["/usr/local/lib", "/usr/lib"];

/// Names of the folder of packages in that of a version of Python; Debian's has another.
const PACKAGES: [&str; 2] = ["site-packages", "dist-packages"];

/// Returns the existing files `path`, such as `nvidia/nccl/lib/libnccl.so.2`, in the folders where
/// Python finds packages, in its order: PYTHONPATH, an active environment (VIRTUAL_ENV,
/// CONDA_PREFIX), packages of the user, packages of the system. Does not run Python.
pub fn find(path: &str) -> Vec<PathBuf> {
    let files = folders(|name| std::env::var_os(name)).into_iter().map(|folder| folder.join(path));
    files.filter(|file| file.is_file()).collect()
}

/// Returns the folders of packages, by the environment variables that `variable` returns.
fn folders(variable: impl Fn(&str) -> Option<OsString>) -> Vec<PathBuf> {
    let given = |name: &str| variable(name).filter(|value| !value.is_empty());
    let mut folders: Vec<PathBuf> =
        given("PYTHONPATH").iter().flat_map(std::env::split_paths).collect();
    // A relative path would depend on the folder in which a job starts.
    folders.retain(|folder| folder.is_absolute());
    let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(given);
    let mut prefixes: Vec<PathBuf> =
        environments.map(|root| PathBuf::from(root).join("lib")).collect();
    if given("PYTHONNOUSERSITE").is_none() {
        prefixes.extend(given("HOME").map(|home| PathBuf::from(home).join(".local/lib")));
    }
    prefixes.extend(PREFIXES.map(PathBuf::from));
    folders.extend(prefixes.iter().flat_map(|prefix| packages(prefix)));
    folders
}

/// Returns the folders of packages of each version of Python in `prefix`, the newest first.
fn packages(prefix: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(prefix).into_iter().flatten().flatten();
    let mut versions: Vec<(Vec<u32>, PathBuf)> = entries
        .filter_map(|entry| Some((version(entry.file_name().to_str()?)?, entry.path())))
        .collect();
    versions.sort_by(|a, b| b.cmp(a));
    let folders = versions.iter().flat_map(|(_, folder)| PACKAGES.map(|name| folder.join(name)));
    folders.collect()
}

/// Returns the version of a folder such as `python3.12`, or `None` if it is not one.
fn version(name: &str) -> Option<Vec<u32>> {
    name.strip_prefix("python")?.split('.').map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_found_in_the_order_of_python() {
        let root = tempfile::tempdir().unwrap();
        let folder = |path: &str| {
            let folder = root.path().join(path);
            std::fs::create_dir_all(&folder).unwrap();
            folder
        };
        let path = folder("given");
        let new = folder("env/lib/python3.12/site-packages");
        let old = folder("env/lib/python3.9/site-packages");
        folder("env/lib/pythonic");
        let own = folder("home/.local/lib/python3.12/site-packages");
        let variable = |no_user: &'static str| {
            let [env, home] = ["env", "home"].map(|name| root.path().join(name));
            let path = path.clone();
            move |name: &str| match name {
                "PYTHONPATH" => Some(std::env::join_paths([&path, Path::new("here")]).unwrap()),
                "VIRTUAL_ENV" => Some(env.clone().into_os_string()),
                "CONDA_PREFIX" => Some("".into()),
                "HOME" => Some(home.clone().into_os_string()),
                "PYTHONNOUSERSITE" => Some(no_user.into()),
                _ => None,
            }
        };
        let mine = |folders: Vec<PathBuf>| -> Vec<PathBuf> {
            folders.into_iter().filter(|folder| folder.starts_with(root.path())).collect()
        };
        let found = mine(folders(variable("")));
        let there: Vec<_> = found.into_iter().filter(|folder| folder.is_dir()).collect();
        assert_eq!(there, [path.clone(), new.clone(), old.clone(), own]);
        let without = mine(folders(variable("1")));
        let there: Vec<_> = without.into_iter().filter(|folder| folder.is_dir()).collect();
        assert_eq!(there, [path.clone(), new, old]);
        assert!(folders(variable("")).iter().all(|folder| folder.is_absolute()));
    }
}
