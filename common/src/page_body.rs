//! Shell: bodies of large pages, of which one at a time is in memory.

use std::{
    convert::Infallible,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::body::{Body, Bytes};
use futures::stream;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

/// Size of the parts in which a page is sent.
const PART_BYTES: usize = 64 << 10;

/// Part of a page that its client has not taken yet, with the turn of the page; `None`: it was given up.
type PageRest = Arc<Mutex<Option<(Bytes, OwnedSemaphorePermit)>>>;

/// Returns the body of a page. It keeps the turn until the client has taken it: clients that do not read could make the
/// component hold any number of pages otherwise. A client that has not taken all after `timeout` gets no more.
pub fn page_body(text: Vec<u8>, turn: OwnedSemaphorePermit, timeout: Duration) -> Body {
    let rest: PageRest = Arc::new(Mutex::new(Some((Bytes::from(text), turn))));
    let unread = Arc::downgrade(&rest);
    // The timer ends with the body: clients that read at once could leave behind any number of timers otherwise.
    let (body_alive, body_end) = oneshot::channel::<Infallible>();
    tokio::spawn(async move {
        let is_late = tokio::time::timeout(timeout, body_end).await.is_err();
        if let Some(rest) = unread.upgrade().filter(|_| is_late) {
            *rest.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    });
    Body::from_stream(stream::unfold((rest, body_alive), |(rest, body_alive)| async move {
        let part = next_part(&rest)?;
        Some((part, (rest, body_alive)))
    }))
}

/// Takes the next part of a page; `None` at the end.
fn next_part(rest: &PageRest) -> Option<io::Result<Bytes>> {
    match &mut *rest.lock().unwrap_or_else(PoisonError::into_inner) {
        Some((text, _)) if text.is_empty() => None,
        Some((text, _)) => {
            let part = text.split_to(text.len().min(PART_BYTES));
            // A copy: a part that waits in the server's buffer would keep the memory of the whole page.
            Some(Ok(Bytes::copy_from_slice(&part)))
        }
        None => Some(Err(io::ErrorKind::TimedOut.into())),
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use tokio::sync::Semaphore;

    use super::*;

    async fn take_turn(turn: &Arc<Semaphore>) -> OwnedSemaphorePermit {
        Arc::clone(turn).acquire_owned().await.expect("it is never closed")
    }

    #[tokio::test]
    async fn a_page_keeps_its_turn_until_it_is_read() {
        let turn = Arc::new(Semaphore::new(1));
        let text = vec![b'x'; 2 * PART_BYTES + 1];
        let body = page_body(text.clone(), take_turn(&turn).await, Duration::from_secs(10));
        assert_eq!(turn.available_permits(), 0);
        let read = axum::body::to_bytes(body, usize::MAX).await.expect("in time");
        assert!(read == text, "{} bytes", read.len());
        assert_eq!(turn.available_permits(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn no_timer_outlives_its_page() {
        let turn = Arc::new(Semaphore::new(1));
        let is_timer_left = || tokio::runtime::Handle::current().metrics().num_alive_tasks() > 0;
        for is_read in [true, false] {
            let body = page_body(vec![b'x'], take_turn(&turn).await, Duration::from_secs(10));
            assert!(is_timer_left());
            if is_read {
                axum::body::to_bytes(body, usize::MAX).await.expect("in time");
            } else {
                drop(body);
            }
            tokio::time::timeout(Duration::from_secs(1), async {
                while is_timer_left() {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
            .await
            .expect("the timer ends with the body");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_loses_the_rest_of_its_page() {
        let turn = Arc::new(Semaphore::new(1));
        let text = vec![b'x'; 3 * PART_BYTES];
        let body = page_body(text, take_turn(&turn).await, Duration::from_millis(200));
        let mut parts = body.into_data_stream();
        let first = parts.next().await.expect("a part").expect("in time");
        assert_eq!(first.len(), PART_BYTES);
        drop(take_turn(&turn).await);
        parts.next().await.expect("an end").expect_err("the rest is given up");
    }
}
