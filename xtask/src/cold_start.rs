//! Pure: one cold start on a local node, split into steps by the load generator's record and the node's log.

use serde::Serialize;

use crate::load::LoadRecord;

/// Phrase of the autoscaler's decisions in the node's log.
const DECIDED: &str = "scale decided";

/// One cold start, split into steps. Times are in ms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct NodeColdStart {
    /// Time from the request to the scale decision; `None` if the log has no decision.
    pub(crate) decide: Option<f64>,
    /// Time from the decision until the pod's `listen` returned; `None` if the log has no decision.
    pub(crate) start: Option<f64>,
    /// Time from `listen` to the first byte at the client.
    pub(crate) listen_to_first_byte: f64,
    /// Time from the request to the first byte.
    pub(crate) total: f64,
}

impl NodeColdStart {
    /// Splits one cold start; `log` is the node's log, with the time of the decision.
    pub(crate) fn from_record(record: &LoadRecord, log: &str) -> Self {
        let ms = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
        let first_byte = record.at_us + record.first_byte_us;
        let listening = record.listening_us;
        let decided = decided_at(log, &record.pod, record.at_us, listening);
        Self {
            decide: decided.map(|decided| ms(record.at_us, decided)),
            start: decided.map(|decided| ms(decided, listening)),
            listen_to_first_byte: ms(listening, first_byte),
            total: ms(record.at_us, first_byte),
        }
    }
}

/// One scale decision from the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoggedDecision<'a> {
    /// Time of the decision, Unix time in µs.
    pub(crate) at_us: u64,
    /// Name of the revision, without its namespace.
    pub(crate) revision: &'a str,
    /// Number of pods that it requests.
    pub(crate) wanted: u32,
}

/// All scale decisions in the log, in order.
pub(crate) fn decisions(log: &str) -> impl Iterator<Item = LoggedDecision<'_>> {
    let lines = log.lines().filter(|line| line.contains(DECIDED));
    lines.filter_map(|line| {
        let revision = field(line, "revision=")?;
        Some(LoggedDecision {
            at_us: parse_unix_us(line.split_whitespace().next()?)?,
            revision: revision.rsplit('/').next().unwrap_or(revision),
            wanted: field(line, "wanted=")?.parse().ok()?,
        })
    })
}

/// Time of the first decision for the revision of `pod` between two moments.
fn decided_at(log: &str, pod: &str, from_us: u64, to_us: u64) -> Option<u64> {
    decisions(log)
        // Decisions of other revisions may be logged meanwhile; a pod's name begins with its revision's name.
        .filter(|it| pod.starts_with(it.revision))
        .map(|it| it.at_us)
        .find(|at| (from_us..=to_us).contains(at))
}

/// Value of a field in a log line.
fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, value) = line.split_once(name)?;
    Some(value.split_whitespace().next()?.trim_matches('"'))
}

/// Parses `2026-11-21T10:00:00.123456Z`, the format of tracing, to Unix time in µs.
pub(crate) fn parse_unix_us(stamp: &str) -> Option<u64> {
    let (date, time) = stamp.strip_suffix('Z')?.split_once('T')?;
    let mut date = date.split('-').map(str::parse::<i64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut clock = clock.split(':').map(str::parse::<i64>);
    let (hour, minute, second) = (clock.next()?.ok()?, clock.next()?.ok()?, clock.next()?.ok()?);
    let micros: i64 = format!("{fraction:0<6}").get(..6)?.parse().ok()?;
    // Days since 1970 of a Gregorian date; years begin in March, so that leap days come last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days =
        365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 719_469;
    let seconds = ((days * 24 + hour) * 60 + minute) * 60 + second;
    u64::try_from(seconds * 1_000_000 + micros).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_stamps_are_read_to_the_microsecond() {
        assert_eq!(parse_unix_us("1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(parse_unix_us("2000-02-29T12:00:00.5Z"), Some(951_825_600_500_000));
        assert_eq!(parse_unix_us("no date"), None);
    }

    #[test]
    fn decisions_are_read_with_their_revision_and_what_they_ask_for() {
        let log = "1970-01-01T00:00:00.000001Z  INFO autoscaler: scale decided revision=d/a-00001 wanted=8 path=Direct\n\
                   1970-01-01T00:00:00.000002Z  INFO controller: scaled revision=d/a-00001 from=1 to=8\n\
                   1970-01-01T00:00:00.000003Z  INFO controller: scale decided revision=d/b-00001 wanted=1\n";
        let read: Vec<_> = decisions(log).map(|it| (it.at_us, it.revision, it.wanted)).collect();
        assert_eq!(read, [(1, "a-00001", 8), (3, "b-00001", 1)]);
    }
}
