//! Divides pieces of memory into messages.

use std::ops::Range;

/// Walks over pieces of memory, message by message. The cuts depend only on the lengths of the
/// pieces, so that sender and receiver make the same ones.
#[derive(Debug, Default, Clone, Copy)]
pub struct ChunkCursor {
    piece: usize,
    at: usize,
}

impl ChunkCursor {
    /// Advances by one message of at most `limit` elements and calls `run` for every piece's part
    /// of it. Short pieces share a message. Returns the message's length, which is 0 at the end.
    pub fn message(
        &mut self,
        len: impl Fn(usize) -> Option<usize>,
        limit: usize,
        mut run: impl FnMut(usize, Range<usize>),
    ) -> usize {
        let mut room = limit;
        while let Some(len) = len(self.piece).filter(|_| room > 0) {
            let end = len.min(self.at + room);
            if end > self.at {
                run(self.piece, self.at..end);
                room -= end - self.at;
            }
            self.at = end;
            if end == len {
                *self = Self { piece: self.piece + 1, at: 0 };
            }
        }
        limit - room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(lens: &[usize], limit: usize) -> Vec<Vec<(usize, Range<usize>)>> {
        let mut cursor = ChunkCursor::default();
        let mut all = Vec::new();
        loop {
            let mut parts = Vec::new();
            let len = cursor.message(
                |i| lens.get(i).copied(),
                limit,
                |piece, range| parts.push((piece, range)),
            );
            assert_eq!(len, parts.iter().map(|(_, range)| range.len()).sum::<usize>());
            if len == 0 {
                return all;
            }
            all.push(parts);
        }
    }

    #[test]
    fn messages_fill_up_and_share() {
        assert!(messages(&[], 4).is_empty() && messages(&[0, 0], 4).is_empty());
        assert_eq!(messages(&[8, 2], 4), [vec![(0, 0..4)], vec![(0, 4..8)], vec![(1, 0..2)]]);
        assert_eq!(
            messages(&[3, 3, 0, 1], 4),
            [vec![(0, 0..3), (1, 0..1)], vec![(1, 1..3), (3, 0..1)]]
        );
    }
}
