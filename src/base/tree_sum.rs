//! Deterministic sums by a binary tree that adds neighbours first.
//!
//! f32 addition is commutative but not associative. A tree whose shape does not depend on the ranks
//! that hold its terms makes every number of ranks give the same bits.

/// Sums the results of consecutive virtual ranks as they arrive, in the shape of a binary tree that
/// adds neighbours first.
///
/// Two subtrees of equal height merge at once, so at most log2(virtual ranks) + 1 partial sums are
/// alive.
#[derive(Debug)]
pub struct Tree<T> {
    /// Partial sums with their heights, which strictly decrease.
    partial: Vec<(u32, T)>,
}

impl<T> Default for Tree<T> {
    fn default() -> Self {
        Self { partial: Vec::new() }
    }
}

impl<T> Tree<T> {
    /// Adds the next virtual rank's result; `add(into, from)` computes `into += from`.
    pub fn push<E>(
        &mut self,
        next: T,
        add: impl FnMut(&mut T, T) -> Result<(), E>,
    ) -> Result<(), E> {
        self.push_subtree(0, next, add)
    }

    /// Adds the sum of the next 2^`height` virtual ranks, as [`Tree::push`] adds that of one. The
    /// number of virtual ranks before must be a multiple of 2^`height`.
    pub fn push_subtree<E>(
        &mut self,
        height: u32,
        next: T,
        mut add: impl FnMut(&mut T, T) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut merged = (height, next);
        while let Some((height, mut left)) = self.partial.pop_if(|(height, _)| *height == merged.0)
        {
            add(&mut left, merged.1)?;
            merged = (height + 1, left);
        }
        self.partial.push(merged);
        Ok(())
    }

    /// Returns the sum of everything that was pushed, or `None` if nothing was.
    pub fn finish<E>(
        &mut self,
        mut add: impl FnMut(&mut T, T) -> Result<(), E>,
    ) -> Result<Option<T>, E> {
        let Some((_, mut sum)) = self.partial.pop() else { return Ok(None) };
        while let Some((_, mut left)) = self.partial.pop() {
            add(&mut left, sum)?;
            sum = left;
        }
        Ok(Some(sum))
    }
}

/// Sums `values` by the same tree. Returns 0 for an empty slice.
pub fn tree_sum(values: &[f64]) -> f64 {
    let add = |into: &mut f64, from| {
        *into += from;
        Ok::<_, std::convert::Infallible>(())
    };
    let mut tree = Tree::default();
    for &value in values {
        let Ok(()) = tree.push(value, add);
    }
    let Ok(sum) = tree.finish(add);
    sum.unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Formats the tree with parentheses.
    fn shape(virtual_ranks: usize) -> String {
        shape_of_subtrees(&vec![0; virtual_ranks])
    }

    /// Formats the tree over consecutive subtrees of these heights.
    fn shape_of_subtrees(heights: &[u32]) -> String {
        let add = |into: &mut String, from: String| {
            *into = format!("({into}{from})");
            Ok::<_, ()>(())
        };
        let mut tree = Tree::default();
        let mut first = 0;
        for height in heights {
            let mut subtree = Tree::default();
            (first..first + (1 << height)).for_each(|i| subtree.push(i.to_string(), add).unwrap());
            first += 1 << height;
            let sum = subtree.finish(add).unwrap().unwrap();
            tree.push_subtree(*height, sum, add).unwrap();
        }
        tree.finish(add).unwrap().unwrap_or_default()
    }

    #[test]
    fn neighbours_first() {
        assert_eq!(shape(0), "");
        assert_eq!(shape(1), "0");
        assert_eq!(shape(3), "((01)2)");
        assert_eq!(shape(6), "(((01)(23))(45))");
        assert_eq!(shape(8), "(((01)(23))((45)(67)))");
    }

    #[test]
    fn aligned_subtrees_do_not_change_the_shape() {
        assert_eq!(shape_of_subtrees(&[1, 1, 1, 0, 0, 0]), shape(9));
        assert_eq!(shape_of_subtrees(&[2, 2, 2, 1, 1, 1, 0, 0]), shape(20));
        assert_eq!(shape_of_subtrees(&[3, 0]), shape(9));
    }

    #[test]
    fn equal_groups_of_a_power_of_two_do_not_change_the_sum() {
        let values: Vec<f64> =
            (0..24).map(|i| (f64::from(i) * 1.7).sin() * 10f64.powi(i % 7)).collect();
        let whole = tree_sum(&values);
        for group in [1, 2, 4, 8] {
            let partial: Vec<f64> = values.chunks(group).map(tree_sum).collect();
            assert_eq!(tree_sum(&partial).to_bits(), whole.to_bits(), "groups of {group}");
        }
    }
}
