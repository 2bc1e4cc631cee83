//! Pure: one connection to a pod, opened by several sockets.
//!
//! A full accept queue drops SYNs, and the kernel repeats a SYN only after a second. Therefore a dial without an early
//! SYN-ACK is repeated on a second socket, then on a third. The first socket that is connected wins, and the others are
//! closed unused. Nothing is sent before one has won, so nothing is sent twice.
//!
//! A dial of raw TCP has one socket only. A server that speaks first notices a socket that is closed unused, and may
//! count it against its client: MySQL does, up to `max_connect_errors`.

use std::time::Duration;

/// Time without a SYN-ACK after which a dial is repeated. Each further wait is twice as long.
pub const FIRST_RETRY_DELAY: Duration = Duration::from_millis(5);
/// Longest wait between two sockets.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(1);
/// Maximum number of sockets of one dial: 5 + 10 + … + 640 + 1000 · 8 ms, about 9 s.
const MAX_SOCKETS: u32 = 16;
/// Time without a SYN-ACK after which a dial of one socket ends. The kernel repeats its SYN after 1, 3 and 7 s.
const ONE_SOCKET_TIMEOUT: Duration = Duration::from_secs(10);

/// State of one dial.
#[derive(Debug, Default)]
pub struct PodDial {
    /// True if it has one socket only.
    has_one_socket: bool,
    /// Number of sockets opened so far.
    attempts: u32,
    /// Number of these sockets that have not failed.
    sockets_alive: u32,
    /// True after `UseSocket` or `GiveUp`.
    is_finished: bool,
}

/// Event in the course of a dial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialEvent {
    /// The timer of the last [`DialAction::Open`] has elapsed. This is also the first event.
    TimerElapsed,
    /// A socket is connected.
    Connected,
    /// A socket was refused. No process listens there, so no other socket can succeed.
    Refused,
    /// A socket failed with another error.
    Failed,
}

/// Next action for the shell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DialAction {
    /// Opens one more socket. Unless another event comes first, `TimerElapsed` follows after this time.
    Open(Duration),
    /// Waits for the next event.
    Wait,
    /// Uses the socket that was just connected and closes the others.
    UseSocket,
    /// Closes all sockets: there is no connection.
    GiveUp,
}

impl PodDial {
    /// Creates a dial that opens no second socket, however long the first one is unanswered.
    pub fn with_one_socket() -> Self {
        Self { has_one_socket: true, ..Self::default() }
    }

    /// Applies one event. Returns the next action, which is always `Wait` after `UseSocket` or `GiveUp`.
    pub fn step(&mut self, event: DialEvent) -> DialAction {
        if self.is_finished {
            return DialAction::Wait;
        }
        match event {
            DialEvent::TimerElapsed => self.open_socket(),
            DialEvent::Connected => self.finish(DialAction::UseSocket),
            DialEvent::Refused => self.finish(DialAction::GiveUp),
            DialEvent::Failed => {
                self.sockets_alive = self.sockets_alive.saturating_sub(1);
                if self.sockets_alive == 0 {
                    self.finish(DialAction::GiveUp)
                } else {
                    DialAction::Wait
                }
            }
        }
    }

    /// Number of sockets opened so far.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    fn open_socket(&mut self) -> DialAction {
        let max_sockets = if self.has_one_socket { 1 } else { MAX_SOCKETS };
        if self.attempts == max_sockets {
            return self.finish(DialAction::GiveUp);
        }
        let wait = match self.has_one_socket {
            true => ONE_SOCKET_TIMEOUT,
            false => (FIRST_RETRY_DELAY * 2u32.pow(self.attempts)).min(MAX_RETRY_DELAY),
        };
        self.attempts += 1;
        self.sockets_alive += 1;
        DialAction::Open(wait)
    }

    fn finish(&mut self, action: DialAction) -> DialAction {
        self.is_finished = true;
        action
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_unanswered_dial_is_repeated_after_5_10_20_ms() {
        let mut dial = PodDial::default();
        let waits: Vec<_> = (0..4).map(|_| dial.step(DialEvent::TimerElapsed)).collect();
        let ms = |ms| DialAction::Open(Duration::from_millis(ms));
        assert_eq!(waits, [ms(5), ms(10), ms(20), ms(40)]);
    }

    #[test]
    fn an_unanswered_dial_ends() {
        let mut dial = PodDial::default();
        let mut spent = Duration::ZERO;
        while let DialAction::Open(wait) = dial.step(DialEvent::TimerElapsed) {
            spent += wait;
        }
        assert_eq!(dial.attempts(), 16);
        assert_eq!(spent, Duration::from_millis(9_275));
    }

    #[test]
    fn a_dial_of_one_socket_opens_no_second_one() {
        let mut dial = PodDial::with_one_socket();
        let opened = dial.step(DialEvent::TimerElapsed);
        assert_eq!(opened, DialAction::Open(Duration::from_secs(10)));
        assert_eq!(dial.step(DialEvent::TimerElapsed), DialAction::GiveUp);
        assert_eq!(dial.attempts(), 1);
    }

    #[test]
    fn the_first_connection_wins_and_no_other_does() {
        let mut dial = PodDial::default();
        dial.step(DialEvent::TimerElapsed);
        dial.step(DialEvent::TimerElapsed);
        assert_eq!(dial.step(DialEvent::Connected), DialAction::UseSocket);
        assert_eq!(dial.step(DialEvent::Connected), DialAction::Wait);
        assert_eq!(dial.step(DialEvent::TimerElapsed), DialAction::Wait);
    }

    #[test]
    fn a_refusal_ends_the_dial() {
        let mut dial = PodDial::default();
        dial.step(DialEvent::TimerElapsed);
        dial.step(DialEvent::TimerElapsed);
        assert_eq!(dial.step(DialEvent::Refused), DialAction::GiveUp);
    }

    #[test]
    fn one_failed_socket_does_not_end_the_others() {
        let mut dial = PodDial::default();
        dial.step(DialEvent::TimerElapsed);
        dial.step(DialEvent::TimerElapsed);
        assert_eq!(dial.step(DialEvent::Failed), DialAction::Wait);
        assert_eq!(dial.step(DialEvent::Failed), DialAction::GiveUp);
    }

    proptest! {
        #[test]
        fn a_dial_finishes_once(events in proptest::collection::vec(0..4u8, 0..60)) {
            let mut dial = PodDial::default();
            dial.step(DialEvent::TimerElapsed);
            let kinds = [DialEvent::TimerElapsed, DialEvent::Connected, DialEvent::Refused, DialEvent::Failed];
            let actions = events.iter().map(|&kind| dial.step(kinds[usize::from(kind)]));
            let ends = actions.filter(|it| matches!(it, DialAction::UseSocket | DialAction::GiveUp)).count();
            prop_assert!(ends <= 1);
            prop_assert!(dial.attempts() <= 16);
        }
    }
}
