//! Pure: HTTP/2: made-up frames, and others' views of them.

mod application;
pub mod frames;
pub mod made;
pub mod pair;
pub mod reference;
pub mod server;

use self::reference::{Reference, What};
use crate::{
    CROWD, Outcome,
    tap::{Event, Tap},
};

/// How many of each were seen: begun, cut, answered.
type Totals = [usize; 3];

/// Compares what was counted with the reference, again and again; looks at each event once.
#[derive(Clone, Debug, Default)]
pub struct Comparison {
    /// Events, and notes of the reference, that are in the totals.
    seen: [usize; 2],
    counted: Totals,
    wanted: Totals,
    /// Something has come behind bytes that were missing.
    pub has_had_gap: bool,
    is_crowded: bool,
    /// A request had no place, so that another one was taken for it that had ended before, or a GOAWAY has not ended it:
    /// nothing is compared any more.
    is_unsure: bool,
}

impl Comparison {
    /// What is wrong between what was counted and what the reference says, if both have read the same bytes.
    ///
    /// Behind a gap in a payload the one goes on to read, and the other does not. So once there has been one, a request may
    /// have been cut by its client for the one, and been answered before that for the other; or have begun just before the
    /// server went away.
    pub fn compare(&mut self, tap: &Tap, reference: &Reference) -> Result<(), String> {
        for event in &tap.events()[self.seen[0]..] {
            match event {
                Event::Started => self.counted[0] += 1,
                Event::Cut => self.counted[1] += 1,
                Event::Answered(..) => self.counted[2] += 1,
                Event::Http2 => {}
                _ => return Err(format!("{event:?} on a connection of HTTP/2")),
            }
        }
        for what in &reference.log[self.seen[1]..] {
            match what {
                What::Started(_) => self.wanted[0] += 1,
                What::Cut(_) => self.wanted[1] += 1,
                What::Answered(_) => self.wanted[2] += 1,
            }
        }
        self.seen = [tap.events().len(), reference.log.len()];
        self.is_crowded |= tap.in_flight() > CROWD;
        let ([started, cut, answered], [begun, gone, heard]) = (self.counted, self.wanted);
        let is_same = match self.has_had_gap {
            false => self.counted == self.wanted,
            true if reference.last.is_some() => true,
            true => started == begun && cut + answered == gone + heard,
        };
        let in_flight = tap.in_flight() as usize;
        let may_differ = tap.has_spilled() && (reference.late > 0 || reference.last.is_some());
        let is_same_now = in_flight == reference.open.len();
        self.is_unsure |= may_differ && !(is_same && is_same_now);
        if self.is_unsure {
            return Ok(());
        }
        if !is_same {
            return Err(format!(
                "started, cut, answered: {:?}, not {:?}",
                self.counted, self.wanted
            ));
        }
        match is_same_now {
            true => Ok(()),
            false => Err(format!("{in_flight} in flight, not {}", reference.open.len())),
        }
    }

    /// Whether requests have ended in the same ways for both.
    pub fn is_exact(&self) -> bool {
        self.counted == self.wanted
    }

    /// What came of it.
    pub fn outcome(&self, requests: u64, is_refused: bool) -> Outcome {
        Outcome {
            requests,
            refused: u64::from(is_refused),
            differing: u64::from(self.is_unsure),
            crowded: u64::from(self.is_crowded),
        }
    }

    /// Requests that were answered.
    pub fn answered(&self) -> u64 {
        self.wanted[2] as u64
    }
}
