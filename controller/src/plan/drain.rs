//! Pure: stopping a pod without losing a request.
//!
//! A pod leaves in three steps: it is marked draining in the RouteTable; once every agent and activator has said
//! that it avoids it nothing new reaches it; once nothing is in flight it is told to stop. A part that does
//! not answer for 1 s is not waited for, and the revision's grace period bounds everything.

use super::{Timer, View};
use crate::world::{Pod, Revision, Stage};

/// How long a silent agent or activator is waited for.
const SILENT_MS: u64 = 1000;

/// Moves every draining pod as far as it may go.
pub(super) fn advance(revision: &mut Revision, view: &View<'_>, timer: &mut Timer) {
    // A pod that somebody else deleted is drained too, but its end is not ours to order.
    for pod in revision.pods.iter_mut().filter(|pod| !pod.is_deleted()) {
        if may_stop(pod, view, timer) {
            pod.stage = Stage::Stopping { since: view.now };
        }
    }
}

fn may_stop(pod: &Pod, view: &View<'_>, timer: &mut Timer) -> bool {
    let Stage::Draining { since } = pod.stage else { return false };
    let grace = view.facts.timeout.as_millis().try_into().unwrap_or(u64::MAX);
    if timer.passed(since.plus_ms(grace), view.now) {
        return true;
    }
    let avoided = view.world.followers.all_avoid(&pod.uid)
        || timer.passed(since.plus_ms(SILENT_MS), view.now);
    // A pod whose listener closed gets no new request, whoever sends it.
    let idle =
        |seen: &common::wire::PodSeen| seen.drained || (!seen.listening && seen.in_flight == 0);
    avoided && view.world.seen.get(&*pod.uid).is_some_and(idle)
}
