//! Pure: how one connection to a pod is brought about.
//!
//! A full accept queue drops SYNs, and the kernel repeats a SYN only after a second. So a dial that is not
//! answered soon is repeated on a second socket, then a third; the first that is answered wins and the
//! others are closed unused. Nothing is sent before one has won, so nothing is sent twice.

use std::time::Duration;

/// A dial is repeated when it is unanswered for this long; the next wait is twice as long.
pub const FIRST_WAIT: Duration = Duration::from_millis(5);
/// The longest wait between two sockets.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// Sockets of one dial at most: 5 + 10 + … + 640 + 1000 · 8 ms, about 9 s.
const SOCKETS: u32 = 16;

/// One dial.
#[derive(Debug, Default)]
pub struct Dial {
    begun: u32,
    open: u32,
    settled: bool,
}

/// What happens to a dial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It begins, or the wait that an [`Action::Open`] named is over.
    Unanswered,
    /// A socket was answered with a connection.
    Connected,
    /// A socket was answered with a refusal: nobody listens, so no other socket will fare better.
    Refused,
    /// A socket failed otherwise.
    Failed,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Open one more socket and, unless one is answered before, report `Unanswered` after this long.
    Open(Duration),
    /// Go on waiting.
    Wait,
    /// Use the socket that was just connected and close the others.
    Win,
    /// Close all: there is no connection.
    GiveUp,
}

impl Dial {
    /// One step. After `Win` or `GiveUp` nothing more is asked for.
    pub fn step(&mut self, event: Event) -> Action {
        if self.settled {
            return Action::Wait;
        }
        match event {
            Event::Unanswered => self.open_another(),
            Event::Connected => self.settle(Action::Win),
            Event::Refused => self.settle(Action::GiveUp),
            Event::Failed => {
                self.open = self.open.saturating_sub(1);
                if self.open == 0 { self.settle(Action::GiveUp) } else { Action::Wait }
            }
        }
    }

    /// Sockets opened so far.
    pub fn sockets(&self) -> u32 {
        self.begun
    }

    fn open_another(&mut self) -> Action {
        if self.begun == SOCKETS {
            return self.settle(Action::GiveUp);
        }
        let wait = FIRST_WAIT * 2u32.pow(self.begun);
        self.begun += 1;
        self.open += 1;
        Action::Open(wait.min(LAST_WAIT))
    }

    fn settle(&mut self, action: Action) -> Action {
        self.settled = true;
        action
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_unanswered_dial_is_repeated_after_5_10_20_ms() {
        let mut dial = Dial::default();
        let waits: Vec<_> = (0..4).map(|_| dial.step(Event::Unanswered)).collect();
        let ms = |ms| Action::Open(Duration::from_millis(ms));
        assert_eq!(waits, [ms(5), ms(10), ms(20), ms(40)]);
    }

    #[test]
    fn a_dial_nobody_answers_ends() {
        let mut dial = Dial::default();
        let mut spent = Duration::ZERO;
        while let Action::Open(wait) = dial.step(Event::Unanswered) {
            spent += wait;
        }
        assert_eq!(dial.sockets(), 16);
        assert_eq!(spent, Duration::from_millis(9_275));
    }

    #[test]
    fn the_first_connection_wins_and_no_other_does() {
        let mut dial = Dial::default();
        dial.step(Event::Unanswered);
        dial.step(Event::Unanswered);
        assert_eq!(dial.step(Event::Connected), Action::Win);
        assert_eq!(dial.step(Event::Connected), Action::Wait);
        assert_eq!(dial.step(Event::Unanswered), Action::Wait);
    }

    #[test]
    fn a_refusal_is_an_answer() {
        let mut dial = Dial::default();
        dial.step(Event::Unanswered);
        dial.step(Event::Unanswered);
        assert_eq!(dial.step(Event::Refused), Action::GiveUp);
    }

    #[test]
    fn one_failed_socket_does_not_end_the_others() {
        let mut dial = Dial::default();
        dial.step(Event::Unanswered);
        dial.step(Event::Unanswered);
        assert_eq!(dial.step(Event::Failed), Action::Wait);
        assert_eq!(dial.step(Event::Failed), Action::GiveUp);
    }

    proptest! {
        #[test]
        fn a_dial_is_settled_once(events in proptest::collection::vec(0..4u8, 0..60)) {
            let mut dial = Dial::default();
            dial.step(Event::Unanswered);
            let kinds = [Event::Unanswered, Event::Connected, Event::Refused, Event::Failed];
            let actions = events.iter().map(|&kind| dial.step(kinds[usize::from(kind)]));
            let ends = actions.filter(|it| matches!(it, Action::Win | Action::GiveUp)).count();
            prop_assert!(ends <= 1);
            prop_assert!(dial.sockets() <= 16);
        }
    }
}
