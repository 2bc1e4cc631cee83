//! Shell: tasks of the streams of clients' HTTP/2 connections.
//!
//! A stream that carries another protocol has a task of hyper for its sending half. hyper tells the owner of the stream
//! about a reset only at a write, and ends the stream in order whenever its owner drops it. The task knows of a reset at
//! once. If it is dropped before, h2 resets the stream. So these tasks run under the control of a [`StreamSender`].

use std::{
    cell::RefCell,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use common::once_signal::OnceSignal;
use hyper::rt::Executor;
use tokio_util::sync::CancellationToken;

tokio::task_local! {
    /// Control for the next task that the present stream's task spawns.
    static NEXT_SENDER: RefCell<Option<Arc<StreamSender>>>;
}

/// Executor of the tasks that hyper spawns for clients' HTTP/2 connections.
#[derive(Clone, Copy, Debug)]
pub struct StreamTaskExecutor;

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for StreamTaskExecutor {
    fn execute(&self, task: F) {
        let spawned = match NEXT_SENDER.try_with(RefCell::take) {
            // A connection spawns the task of a new stream.
            Err(_) => tokio::spawn(NEXT_SENDER.scope(RefCell::default(), task)),
            // The task of a stream spawns that of its sending half.
            Ok(Some(sender)) => tokio::spawn(async move { sender.run(task).await }),
            Ok(None) => tokio::spawn(task),
        };
        // It ends with its stream, at the latest with the connection.
        drop(spawned);
    }
}

/// Sending half of a client's stream that carries another protocol.
#[derive(Debug, Default)]
pub struct StreamSender {
    /// Cancelled to reset the stream.
    reset: CancellationToken,
    /// Set once the task of the sending half has ended.
    ended: OnceSignal,
    /// True once the sending half ends in order, after what was written.
    is_finished: AtomicBool,
}

impl StreamSender {
    /// Creates the sending half of the present task's stream. The next task that hyper spawns for the stream has to be
    /// the one of this half. `None`: the present task is not that of a stream.
    pub fn of_current_stream() -> Option<Arc<Self>> {
        let sender = Arc::<Self>::default();
        let register = |next: &RefCell<_>| drop(next.replace(Some(Arc::clone(&sender))));
        NEXT_SENDER.try_with(register).ok()?;
        Some(sender)
    }

    /// Registers that the sending half ends in order, so that the end of its task is no reset.
    pub fn mark_finished(&self) {
        self.is_finished.store(true, Ordering::Relaxed);
    }

    /// Waits until the client has reset the stream, or its connection has ended. It waits without limit once the
    /// sending half ends in order.
    pub async fn wait_reset(&self) {
        self.ended.wait().await;
        if self.is_finished.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    }

    /// Gives the sending half up without its end, and waits until nothing can be sent any more. The stream is reset
    /// once its receiving half is dropped. The caller has received that half from hyper: without it there is no task
    /// whose end could be awaited.
    pub async fn reset(&self) {
        self.reset.cancel();
        self.ended.wait().await;
    }

    async fn run(&self, task: impl Future<Output = ()>) {
        tokio::select! {
            biased;
            () = self.reset.cancelled() => {}
            () = task => {}
        }
        self.ended.set();
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use tokio::sync::oneshot;

    use super::*;

    /// Runs a stream's task that spawns a task which never ends by itself. Returns the sending half, and a receiver
    /// that fails once that task has been dropped.
    async fn start_sending_half() -> (Arc<StreamSender>, oneshot::Receiver<()>) {
        let (parts_tx, parts) = oneshot::channel();
        StreamTaskExecutor.execute(async move {
            let sender = StreamSender::of_current_stream().expect("the task of a stream");
            let (kept, dropped) = oneshot::channel::<()>();
            StreamTaskExecutor.execute(async move {
                let _kept = kept;
                std::future::pending::<()>().await;
            });
            drop(parts_tx.send((sender, dropped)));
        });
        parts.await.expect("the task runs")
    }

    #[tokio::test]
    async fn a_reset_drops_the_task_of_the_sending_half() {
        let (sender, dropped) = start_sending_half().await;
        assert!(sender.wait_reset().now_or_never().is_none(), "it has not ended");
        sender.reset().await;
        assert!(dropped.now_or_never().is_some_and(|it| it.is_err()), "nothing can be sent");
    }

    #[tokio::test]
    async fn the_end_of_the_task_is_a_reset_unless_the_half_was_finished() {
        for is_finished in [false, true] {
            let sender = Arc::<StreamSender>::default();
            if is_finished {
                sender.mark_finished();
            }
            sender.run(async {}).await;
            assert_eq!(sender.wait_reset().now_or_never().is_none(), is_finished);
        }
    }

    #[tokio::test]
    async fn each_sending_half_belongs_to_one_stream() {
        let (one, _one_dropped) = start_sending_half().await;
        let (two, two_dropped) = start_sending_half().await;
        one.reset().await;
        assert!(two.wait_reset().now_or_never().is_none(), "the other stream goes on");
        assert!(two_dropped.now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_task_of_no_stream_has_no_sending_half() {
        assert!(StreamSender::of_current_stream().is_none());
    }
}
