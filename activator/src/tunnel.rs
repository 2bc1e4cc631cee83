//! Shell: a connection that has switched protocols, WebSocket for example.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

use crate::revision::Place;

/// Carries bytes both ways until both ends have closed, the request's time is up or the activator stops.
///
/// Knative ends upgraded connections by `timeoutSeconds` too.
pub async fn tunnel(
    client: OnUpgrade,
    pod: OnUpgrade,
    place: Place,
    until: Instant,
    stop: CancellationToken,
) {
    let carry = async {
        let (client, pod) = futures::future::try_join(client, pod).await?;
        let (mut client, mut pod) = (TokioIo::new(client), TokioIo::new(pod));
        let carried = tokio::io::copy_bidirectional(&mut client, &mut pod).await;
        debug!(pod = %place.pod.uid, ?carried, "upgraded connection ended");
        Ok::<_, hyper::Error>(())
    };
    tokio::select! {
        ended = carry => if let Err(error) = ended {
            debug!(pod = %place.pod.uid, %error, "upgrade failed");
        },
        () = tokio::time::sleep_until(until) => {
            info!(pod = %place.pod.uid, "upgraded connection ended: request timeout");
        }
        () = stop.cancelled() => {}
    }
}
