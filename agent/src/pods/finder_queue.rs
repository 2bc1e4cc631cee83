//! Shell: queue of commands to the finder, whose channel is bounded.

use std::collections::VecDeque;

use tokio::sync::mpsc::Sender;

use crate::pods::finder::FinderCommand;

/// Commands to the finder, first in, first out. The loop never waits for the channel.
#[derive(Debug)]
pub(crate) struct FinderQueue {
    backlog: VecDeque<FinderCommand>,
    commands: Sender<FinderCommand>,
}

impl FinderQueue {
    /// Makes an empty queue in front of the finder's channel.
    pub(crate) fn new(commands: Sender<FinderCommand>) -> Self {
        Self { backlog: VecDeque::new(), commands }
    }

    /// Returns the finder's channel, for tasks that may wait.
    pub(crate) fn channel(&self) -> Sender<FinderCommand> {
        self.commands.clone()
    }

    /// Adds a command, to be sent by [`flush`](Self::flush).
    pub(crate) fn push(&mut self, command: FinderCommand) {
        self.backlog.push_back(command);
    }

    /// Sends the finder as many commands as its channel takes.
    pub(crate) fn flush(&mut self) {
        while let Some(command) = self.backlog.pop_front() {
            if let Err(full) = self.commands.try_send(command) {
                self.backlog.push_front(full.into_inner());
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn commands_that_do_not_fit_wait_in_their_order() {
        let (send, mut receive) = tokio::sync::mpsc::channel(2);
        let mut queue = FinderQueue::new(send);
        for uid in ["a", "b", "c"] {
            queue.push(FinderCommand::Find(uid.into()));
        }
        let mut sent = Vec::new();
        for _ in 0..2 {
            queue.flush();
            while let Ok(FinderCommand::Find(uid)) = receive.try_recv() {
                sent.push(uid);
            }
        }
        assert_eq!(sent, ["a", "b", "c"]);
    }
}
