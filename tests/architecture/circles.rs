//! Circles between files: files that use one another, by way of others too. A name that a module
//! hands on counts as a use of the file that defines it.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};
use syn::{Attribute, ItemMod, ItemUse, UseTree, Visibility};

/// Circles that stay: one of their files, how many they are, and the reason.
const MEANT: [(&str, usize, &str); 4] = [
    ("checkpoint/huggingface/architecture.rs", 3, "a registry and its entries"),
    (
        "doctor/mod.rs",
        7,
        "the folder's root has the findings; probes list the checks, which ask probes",
    ),
    ("nn/layers/layer.rs", 15, "a registry and its entries, sequences among them"),
    (
        "nn/network.rs",
        3,
        "networks by layers are one of the families, and may hold the others' parts",
    ),
];

/// A path of names, such as that of a module.
type Path = Vec<String>;

/// The names that a file uses, and those that it hands on.
#[derive(Default)]
struct Names {
    used: Vec<Path>,
    handed_on: BTreeMap<String, Path>,
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes
        .iter()
        .any(|attribute| attribute.path().is_ident("cfg") && quoted(attribute).contains("test"))
}

fn quoted(attribute: &Attribute) -> String {
    attribute.meta.require_list().map_or(String::new(), |list| list.tokens.to_string())
}

/// The paths of a tree, each with the name that it has here.
fn opened(tree: &UseTree, mut path: Path, found: &mut Vec<(String, Path)>) {
    match tree {
        UseTree::Path(tree_of) => {
            path.push(tree_of.ident.to_string());
            opened(&tree_of.tree, path, found);
        }
        UseTree::Group(group) => {
            group.items.iter().for_each(|tree| opened(tree, path.clone(), found))
        }
        UseTree::Name(name) => {
            path.push(name.ident.to_string());
            found.push((name.ident.to_string(), path));
        }
        UseTree::Rename(name) => {
            path.push(name.ident.to_string());
            found.push((name.rename.to_string(), path));
        }
        UseTree::Glob(_) => found.push(("*".into(), path)),
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if !is_test(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let mut found = Vec::new();
        opened(&item.tree, vec![], &mut found);
        match item.vis {
            Visibility::Inherited => self.used.extend(found.into_iter().map(|(_, path)| path)),
            _ => self.handed_on.extend(found),
        }
    }

    /// The visibility of a name is no use of a module.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Path = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if ["crate", "super", "self"].contains(&&*names[0]) {
            self.used.push(names);
        }
        visit::visit_path(self, path);
    }
}

/// The files by module, and their names.
struct Files(BTreeMap<Path, (String, Names)>);

impl Files {
    fn read() -> Self {
        let sources = crate::texts().into_iter().filter(|(file, _)| {
            // Roots know all; tests use what they like.
            let is_test = file.starts_with("device_tests/")
                || file.ends_with("/tests.rs")
                || file.ends_with("/suite.rs");
            !["main.rs", "lib.rs", "base/mod.rs"].contains(&&**file) && !is_test
        });
        let read = |(file, text): (String, String)| {
            let mut module: Path =
                file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
            module.pop_if(|last| last == "mod");
            let mut names = Names::default();
            names.visit_file(&syn::parse_file(&text).unwrap());
            (module, (file, names))
        };
        Self(sources.map(read).collect())
    }

    /// The file that defines what `path` means in `module`.
    fn find(&self, module: &Path, path: &[String], depth: usize) -> Option<&str> {
        let mut at = module.clone();
        let mut rest = path;
        match &*path[0] {
            "crate" => {
                at.clear();
                rest = &rest[1..];
                // All but the root's crate are folders.
                at.extend(
                    crate::CRATES
                        .iter()
                        .find(|(name, _)| *name == module[0])
                        .map(|(name, _)| (*name).to_owned()),
                );
            }
            "self" => rest = &rest[1..],
            "super" => {
                while rest.first().is_some_and(|name| name == "super") {
                    at.pop();
                    rest = &rest[1..];
                }
            }
            // Of another crate, unless it is a module below.
            name if !self.0.contains_key(&[&at[..], &[name.to_owned()]].concat()) => return None,
            _ => {}
        }
        for name in rest {
            let inner = [&at[..], std::slice::from_ref(name)].concat();
            if self.0.contains_key(&inner) {
                at = inner;
                continue;
            }
            let handed_on = self.0.get(&at).and_then(|(_, names)| names.handed_on.get(name));
            if let Some(file) =
                handed_on.filter(|_| depth < 8).and_then(|path| self.find(&at, path, depth + 1))
            {
                return Some(file);
            }
            break;
        }
        self.0.get(&at).map(|(file, _)| &**file)
    }

    /// The files that each file uses.
    fn edges(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let of = |(module, (file, names)): (&Path, &'_ (String, Names))| -> BTreeSet<&str> {
            let found = names.used.iter().filter_map(|path| self.find(module, path, 0));
            found.filter(|other| other != file).collect()
        };
        self.0.iter().map(|entry| (&*entry.1.0, of(entry))).collect()
    }
}

/// All that can be reached from a file.
fn reached<'a>(edges: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &'a str) -> BTreeSet<&'a str> {
    let mut found = BTreeSet::new();
    let mut open = vec![from];
    while let Some(file) = open.pop() {
        open.extend(edges[file].iter().filter(|next| found.insert(**next)));
    }
    found
}

#[test]
fn files_use_one_another_in_no_circles_but_those_that_are_meant() {
    let files = Files::read();
    let edges = files.edges();
    let all: BTreeMap<&str, BTreeSet<&str>> =
        edges.keys().map(|file| (*file, reached(&edges, file))).collect();
    let mut circles = BTreeSet::new();
    for (file, ahead) in all.iter().filter(|(file, ahead)| ahead.contains(*file)) {
        let circle: BTreeSet<&str> =
            ahead.iter().copied().filter(|other| all[other].contains(file)).collect();
        circles.insert(circle);
    }
    for (file, files, reason) in MEANT {
        let found = circles.iter().find(|circle| circle.contains(file)).cloned();
        let found = found.unwrap_or_else(|| {
            panic!("{file} is in no circle any more: take it off the list ({reason})")
        });
        assert_eq!(found.len(), files, "the circle of {file} ({reason}): {found:#?}");
        circles.remove(&found);
    }
    assert!(circles.is_empty(), "circles: {circles:#?}");
    // The reader finds what is there.
    assert!(
        edges["engine/train_round.rs"].contains("engine/forward_backward.rs")
            && edges["cli/doctor.rs"].contains("doctor/mod.rs")
    );
}
