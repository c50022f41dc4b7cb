//! Iteration over the groups of an HDF5 file, each visited once.
//!
//! Links may lead back to a group above, and groups of other programs' files may be nested
//! arbitrarily deep. So the walk keeps a list instead of recursing, remembers the objects that it
//! has visited, and stops at a depth.

use std::collections::HashSet;

use hdf5::{Group, LocationInfo, LocationType};

/// The largest depth of nested groups.
pub(super) const DEEPEST: usize = 64;

/// An iteration over the groups of a file.
pub(super) struct Walk<'a> {
    root: &'a Group,
    /// The paths of groups that are still to be visited, and their depths.
    pending: Vec<(String, usize)>,
    /// The groups that were visited or are pending.
    seen: HashSet<String>,
}

/// A group that is being visited.
pub(super) struct Visited {
    pub group: Group,
    /// The path of the group, without a slash at the end.
    pub path: String,
    depth: usize,
}

/// The target of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkTarget {
    Dataset,
    /// A group, which is visited later unless it was seen before.
    Group,
    /// A group that was not seen before, deeper than the walk goes.
    TooDeep,
    /// A named type, or nothing that can be opened.
    Other,
}

impl<'a> Walk<'a> {
    /// Creates a walk that begins at a group.
    pub(super) fn new(root: &'a Group) -> Self {
        let seen = root.loc_info().map(|info| identity(&info)).into_iter().collect();
        Self { root, pending: vec![(String::new(), 0)], seen }
    }

    /// Returns the next group. Groups that cannot be opened are skipped.
    pub(super) fn next(&mut self) -> Option<Visited> {
        while let Some((path, depth)) = self.pending.pop() {
            let opened = self.root.group(if path.is_empty() { "/" } else { &path });
            if let Ok(group) = opened {
                return Some(Visited { group, path, depth });
            }
        }
        None
    }

    /// Follows the link `name` of a group that is being visited. HDF5 opens the file that an
    /// external link refers to.
    pub(super) fn follow(&mut self, from: &Visited, name: &str) -> LinkTarget {
        let Ok(info) = from.group.loc_info_by_name(name) else { return LinkTarget::Other };
        match info.loc_type {
            LocationType::Dataset => LinkTarget::Dataset,
            LocationType::Group if !self.seen.insert(identity(&info)) => LinkTarget::Group,
            LocationType::Group if from.depth == DEEPEST => LinkTarget::TooDeep,
            LocationType::Group => {
                self.pending.push((format!("{}/{name}", from.path), from.depth + 1));
                LinkTarget::Group
            }
            _ => LinkTarget::Other,
        }
    }
}

/// Returns the identity of an object, whatever links lead to it. HDF5 provides its address for
/// comparison and printing only.
fn identity(info: &LocationInfo) -> String {
    format!("{} {:?}", info.fileno, info.token)
}

/// Returns the paths of all datasets, sorted. Datasets of nested groups and behind links are
/// included, once for each group.
///
/// # Errors
/// Returns an error if a group cannot be listed.
pub(super) fn dataset_names(root: &Group) -> hdf5::Result<Vec<String>> {
    let mut names = Vec::new();
    let mut walk = Walk::new(root);
    while let Some(visited) = walk.next() {
        for name in visited.group.member_names()? {
            if walk.follow(&visited, &name) == LinkTarget::Dataset {
                names.push(format!("{}/{name}", visited.path));
            }
        }
    }
    names.sort();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hdf5_open::{create, create_group};

    #[test]
    fn links_to_a_parent_are_followed_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("loop.h5");
        let file = create(&path).unwrap();
        let group = create_group(&file, "a").unwrap();
        group.new_dataset::<u8>().shape(1).create("x").unwrap();
        file.link_hard("/", "a/hard").unwrap();
        for number in 0..20 {
            file.link_soft("/", &format!("soft{number}")).unwrap();
            file.link_external("loop.h5", "/", &format!("a/other{number}")).unwrap();
        }
        file.close().unwrap();
        let file = crate::hdf5_open::open(&path).unwrap();
        assert_eq!(dataset_names(&file).unwrap(), ["/a/x"]);
    }

    #[test]
    fn deep_groups_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let file = create(&folder.path().join("deep.h5")).unwrap();
        let mut group = create_group(&file, "g").unwrap();
        for depth in 1..2_000 {
            group.new_dataset::<u8>().shape(1).create("x").unwrap();
            group = create_group(&group, &format!("g{depth}")).unwrap();
        }
        assert_eq!(dataset_names(&file).unwrap().len(), DEEPEST);
    }
}
