use std::sync::mpsc;

use common::request_log::LogTemplate;
use futures::FutureExt as _;

use super::*;

/// Output that reports each write, and then waits until the test opens or drops the gate.
struct GatedSink {
    entered: mpsc::Sender<()>,
    gate: mpsc::Receiver<()>,
}

impl io::Write for GatedSink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _test_has_ended = self.entered.send(());
        let _gate_is_gone = self.gate.recv();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn settings() -> Option<wire::RequestLogSettings> {
    let template = LogTemplate::parse("line").expect("a template");
    Some(wire::RequestLogSettings { template, logs_probes: false })
}

#[tokio::test]
async fn a_flush_behind_a_full_queue_waits_for_its_lines() {
    let counters = RequestLogCounters::default();
    let log = RequestLogger::new(counters.clone());
    let ((entered_tx, entered), (open_gate, gate)) = (mpsc::channel(), mpsc::channel());
    log.set_sink(Box::new(GatedSink { entered: entered_tx, gate }));
    log.apply_settings(settings());
    log.enqueue_line("line\n".to_owned());
    entered.recv().expect("the writer has the first line");
    (0..MAX_QUEUED_LINES).for_each(|_| log.enqueue_line("line\n".to_owned()));
    assert_eq!(counters.dropped.get(), 0, "the queue is just full");
    let mut flush = Box::pin(log.flush(Duration::from_secs(3600)));
    assert!(flush.as_mut().now_or_never().is_none(), "lines are not written yet");
    drop(open_gate);
    flush.await;
    let lines = u64::try_from(MAX_QUEUED_LINES).expect("fits") + 1;
    assert_eq!((counters.written.get(), counters.dropped.get()), (lines, 0));
}

#[tokio::test]
async fn lines_without_a_writer_are_counted_and_the_next_settings_start_it() {
    let counters = RequestLogCounters::default();
    let log = RequestLogger::new(counters.clone());
    log.set_sink(Box::new(io::sink()));
    log.start_writer(|_| Err(io::ErrorKind::WouldBlock.into()));
    log.enqueue_line("line\n".to_owned());
    assert_eq!((counters.written.get(), counters.dropped.get()), (0, 1));
    // The same settings come again, with a snapshot for example.
    *log.settings.write().expect("not poisoned") = settings().map(Arc::new);
    log.apply_settings(settings());
    log.enqueue_line("line\n".to_owned());
    log.flush(Duration::from_secs(3600)).await;
    assert_eq!((counters.written.get(), counters.dropped.get()), (1, 1));
}
