//! What ranks tell each other with every step, beside losses and norms: so that all act on it at the same step.

/// A rank's note: a set of the constants below.
pub type Note = u32;

/// The job is to save and end soon: a signal came, or its time is nearly up.
pub const END: Note = 1 << 0;
/// This rank has done its part of the save under way.
pub const WRITTEN: Note = 1 << 1;
/// Of rank 0: a checkpoint is due by its clock.
pub const DUE: Note = 1 << 2;
/// Training is to stop, because it no longer helps.
pub const STOP: Note = 1 << 3;
/// A hook of this rank has failed.
pub const FAILED: Note = 1 << 4;

/// The notes of all ranks at one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notes(pub Vec<Note>);

impl Notes {
    /// Whether any rank says so.
    pub fn any(&self, what: Note) -> bool {
        self.0.iter().any(|note| note & what != 0)
    }

    /// Whether all ranks say so.
    pub fn all(&self, what: Note) -> bool {
        self.0.iter().all(|note| note & what != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_or_all() {
        let notes = Notes(vec![END | WRITTEN, WRITTEN]);
        assert!(notes.any(END) && !notes.all(END) && notes.all(WRITTEN) && !notes.any(STOP));
    }
}
