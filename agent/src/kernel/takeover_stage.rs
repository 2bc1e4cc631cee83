//! Pure: stages of a takeover from another version's eBPF programs.

/// Stage of this agent's takeover from another version's programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ProgramTakeoverStage {
    /// The tables are not filled yet.
    #[default]
    TablesEmpty,
    /// The tables are filled: connects may follow them.
    TablesFilled,
    /// The other version's programs count nothing any more.
    OldIdle,
}
