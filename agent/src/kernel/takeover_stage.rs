//! Pure: stages of a takeover from another version's eBPF programs.

/// Stage of this agent's takeover from another version's programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ProgramTakeoverStage {
    /// The tables are not filled yet.
    #[default]
    TablesEmpty,
    /// The tables are filled: connects may follow them.
    TablesFilled,
    /// The tables are filled, and the other version's programs count nothing any more.
    OldIdle,
}

impl ProgramTakeoverStage {
    /// Returns the stage once `reached` was observed. It never decreases, and it passes over no stage: idle programs of
    /// another version may still lead connects by tables that this version has not filled.
    pub(crate) fn advance(self, reached: Self) -> Self {
        match (self, reached) {
            (Self::TablesEmpty, Self::OldIdle) => self,
            _ => self.max(reached),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{ProgramTakeoverStage::*, *};

    /// Returns the stage after these observations.
    fn stage_after(observed: &[ProgramTakeoverStage]) -> ProgramTakeoverStage {
        observed.iter().fold(ProgramTakeoverStage::default(), |stage, &it| stage.advance(it))
    }

    #[test]
    fn idle_programs_are_retired_only_once_the_tables_are_filled() {
        assert_eq!(stage_after(&[OldIdle, OldIdle]), TablesEmpty);
        assert_eq!(stage_after(&[OldIdle, TablesFilled]), TablesFilled);
        assert_eq!(stage_after(&[OldIdle, TablesFilled, OldIdle]), OldIdle);
    }

    #[test]
    fn a_stage_never_decreases() {
        assert_eq!(stage_after(&[TablesFilled, TablesEmpty]), TablesFilled);
        assert_eq!(stage_after(&[TablesFilled, OldIdle, TablesFilled]), OldIdle);
    }
}
