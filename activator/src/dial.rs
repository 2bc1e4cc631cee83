//! Pure: one connection to a pod, opened by several sockets.
//!
//! A full accept queue drops SYNs, and the kernel repeats a SYN only after a second. Therefore a dial without an early
//! answer is repeated on a second socket, then on a third. The first socket that is connected wins, and the others are
//! closed unused. Nothing is sent before one has won, so nothing is sent twice.

use std::time::Duration;

/// Time without an answer after which a dial is repeated. Each further wait is twice as long.
pub const FIRST_WAIT: Duration = Duration::from_millis(5);
/// Longest wait between two sockets.
const LAST_WAIT: Duration = Duration::from_secs(1);
/// Maximum number of sockets of one dial: 5 + 10 + … + 640 + 1000 · 8 ms, about 9 s.
const SOCKETS: u32 = 16;

/// State of one dial.
#[derive(Debug, Default)]
/// Number of sockets opened so far.
pub struct Dial {
    begun: u32,
    /// Number of sockets that have not failed.
    open: u32,
    /// True after `Win` or `GiveUp`.
    settled: bool,
}

/// Event in the course of a dial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The dial begins, or the wait that an [`Action::Open`] named is over.
    Unanswered,
    /// A socket is connected.
    Connected,
    /// A socket was refused. No process listens there, so no other socket can succeed.
    Refused,
    /// A socket failed with another error.
    Failed,
}

/// Next action for the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Opens one more socket. Unless one is answered before, `Unanswered` follows after this time.
    Open(Duration),
    /// Waits for the next event.
    Wait,
    /// Uses the socket that was just connected and closes the others.
    Win,
    /// Closes all sockets: there is no connection.
    GiveUp,
}

impl Dial {
    /// Applies one event. Returns the next action, which is always `Wait` after `Win` or `GiveUp`.
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

    /// Number of sockets opened so far.
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
