//! Pure: number of connections (or requests a second) at each moment of a run.

use std::{str::FromStr, time::Duration};

/// Stages of a run: level and length of each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LoadStages(Vec<(u32, Duration)>);

impl FromStr for LoadStages {
    type Err = String;

    /// Parses `4x3s,40x15s`: 4 for 3 s, then 40 for 15 s. Milliseconds are written `500ms`.
    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').map(parse_stage).collect::<Result<_, _>>().map(Self)
    }
}

fn parse_stage(text: &str) -> Result<(u32, Duration), String> {
    let error = || format!("{text}: write LEVELxSECONDSs, such as 40x15s or 1x500ms");
    let (level, time) = text.split_once('x').ok_or_else(error)?;
    let level = level.parse().ok().ok_or_else(error)?;
    let millis = match time.strip_suffix("ms") {
        Some(millis) => millis.parse().ok().ok_or_else(error)?,
        None => {
            let seconds = time.strip_suffix('s').ok_or_else(error)?;
            seconds.parse::<u64>().ok().ok_or_else(error)? * 1000
        }
    };
    Ok((level, Duration::from_millis(millis)))
}

impl LoadStages {
    /// Level at `elapsed` since the start; `None` after the end of the run.
    pub(crate) fn level_at(&self, elapsed: Duration) -> Option<u32> {
        let mut end = Duration::ZERO;
        self.0.iter().find_map(|&(level, length)| {
            end += length;
            (elapsed < end).then_some(level)
        })
    }

    /// Highest level of all stages.
    pub(crate) fn max_level(&self) -> u32 {
        self.0.iter().map(|&(level, _)| level).max().unwrap_or(0)
    }

    /// Time from `elapsed` until the level exceeds `index`: zero if it does now, `None` if it never will.
    pub(crate) fn until_above(&self, index: u32, elapsed: Duration) -> Option<Duration> {
        let mut start = Duration::ZERO;
        self.0.iter().find_map(|&(level, length)| {
            let end = start + length;
            let wait = start.saturating_sub(elapsed);
            start = end;
            // The first stage that has not ended and has room for this worker.
            (level > index && elapsed < end).then_some(wait)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn levels_follow_one_another() {
        let stages: LoadStages = "4x1s,40x500ms".parse().unwrap();
        assert_eq!(stages.level_at(at(0)), Some(4));
        assert_eq!(stages.level_at(at(1000)), Some(40));
        assert_eq!(stages.level_at(at(1500)), None);
        assert_eq!(stages.max_level(), 40);
    }

    #[test]
    fn a_worker_waits_for_its_stage() {
        let stages: LoadStages = "4x1s,40x1s,2x1s".parse().unwrap();
        assert_eq!(stages.until_above(0, at(500)), Some(at(0)));
        assert_eq!(stages.until_above(30, at(500)), Some(at(500)));
        assert_eq!(stages.until_above(30, at(2500)), None);
    }

    #[test]
    fn a_stage_without_a_unit_is_refused() {
        assert_eq!(
            "40x15".parse::<LoadStages>(),
            Err("40x15: write LEVELxSECONDSs, such as 40x15s or 1x500ms".into())
        );
    }
}
