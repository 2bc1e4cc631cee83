//! Pure: what agents and activators report: which pods listen, and which draining ones nobody sends to any more.

use std::collections::{BTreeMap, BTreeSet};

use common::wire::{Name, PodSeen, Role, Subscriber};
use tracing::warn;

use super::Machine;
use crate::{
    followers, plan,
    world::{App, Kind, Platform, Stamp, World},
};

/// So many pods of one reporter may wait to be known here; a node has a few hundred.
const EARLY: usize = 1000;

/// What one reporter has named.
#[derive(Debug, Default)]
pub(super) struct Report {
    /// Where it runs.
    node: String,
    pods: BTreeSet<String>,
    unnamed: Option<BTreeSet<String>>,
    /// Seen before the API server's word of where they are.
    early: BTreeMap<String, PodSeen>,
}

/// Whose word counts for a pod.
enum Place {
    /// That of the reporter: the pod is on its node.
    Here,
    /// That of the agent of another node.
    There(String),
    /// Not known yet.
    Unknown,
}

impl Machine {
    pub(super) fn report_begin(&mut self, who: &Subscriber, stream: u64, now: Stamp) {
        let was_away = self.world.is_away(&who.node);
        self.world.followers.begin(&reporter(who), stream);
        self.node_changed(&who.node, was_away, now);
        let report = self.reports.entry(reporter(who)).or_default();
        report.node.clone_from(&who.node);
        // What an earlier stream did not come to name is still to be named.
        let named = std::mem::take(&mut report.pods);
        report.unnamed.get_or_insert_default().extend(named);
    }

    pub(super) fn report_synced(&mut self, who: &Subscriber, stream: u64, now: Stamp) {
        self.world.followers.synced(&reporter(who), stream);
        let Some(report) = self.reports.get_mut(&reporter(who)) else { return };
        let Some(mut gone) = report.unnamed.take() else { return };
        gone.iter().for_each(|uid| drop(report.early.remove(uid)));
        // Only the local node's pods are remembered; on Kubernetes a hundred agents would look at all there are.
        if who.role == Role::Agent && self.world.settings.platform == Platform::Local {
            let remembered = self.world.apps.values().flat_map(|app| app.pods());
            let remembered = remembered.filter(|(_, pod)| pod.remembered.is_some());
            let silent = remembered.filter(|(_, pod)| !report.pods.contains(&*pod.uid));
            gone.extend(silent.map(|(_, pod)| pod.uid.to_string()));
        }
        for uid in gone {
            self.forget_seen(&uid, now);
        }
    }

    pub(super) fn report_end(&mut self, who: &Subscriber, stream: u64, now: Stamp) {
        let was_away = self.world.is_away(&who.node);
        self.world.followers.end(&reporter(who), stream);
        self.node_changed(&who.node, was_away, now);
        self.settle_draining(now);
    }

    /// The pod of a reporter is gone. What it called not ready may have become so, which others say then; of what it
    /// called ready the kubelet tells when that ends.
    pub(super) fn report_lost(&mut self, who: &str, now: Stamp) {
        let Some(report) = self.reports.get(who) else { return };
        let waits = |uid: &&String| self.world.seen.get(*uid).is_some_and(|it| !it.ready);
        for uid in report.pods.iter().filter(waits).cloned().collect::<Vec<_>>() {
            self.forget_seen(&uid, now);
        }
    }

    /// The follower opens no connection to the pod, or may do so again.
    pub(super) fn avoid(
        &mut self,
        who: &Subscriber,
        stream: u64,
        uid: &str,
        avoids: bool,
        now: Stamp,
    ) {
        let (followers, who) = (&mut self.world.followers, reporter(who));
        if avoids {
            followers.avoids(&who, stream, uid);
        } else {
            followers.avoids_no_more(&who, stream, uid);
        }
        let Some(app) = self.owners.get(uid).cloned() else { return };
        if self.draining.contains(&app) {
            self.settle(&app, None, false, now);
        }
    }

    /// The activator names each service that it leads to some revision.
    pub(super) fn names_routed(&mut self, who: &Subscriber, stream: u64) {
        self.world.followers.names_routed(&reporter(who), stream);
    }

    /// The activator leads the service to some revision, or does no more.
    pub(super) fn routed(
        &mut self,
        who: &Subscriber,
        stream: u64,
        name: &Name,
        leads: bool,
        now: Stamp,
    ) {
        self.world.followers.routed(&reporter(who), stream, name, leads);
        let Some(app) = self.world.app_named(name) else { return };
        let waits = |app: &App| !app.conditions.is_true(Kind::RouteIngress);
        if leads && self.world.apps.get(&app).is_some_and(|it| waits(it)) {
            self.settle(&app, None, false, now);
        }
    }

    pub(super) fn see(&mut self, who: &Subscriber, seen: PodSeen, now: Stamp) {
        let place = self.place(&who.node, &seen.uid);
        if let Place::There(node) = place {
            return self.refuse_report(&who.node, &seen.uid, &node);
        }
        let report = self.reports.entry(reporter(who)).or_default();
        report.node.clone_from(&who.node);
        report.pods.insert(seen.uid.clone());
        if let Some(unnamed) = &mut report.unnamed {
            unnamed.remove(&seen.uid);
        }
        match place {
            Place::Unknown if report.early.len() < EARLY => {
                report.early.insert(seen.uid.clone(), seen);
            }
            Place::Unknown | Place::There(_) => {}
            Place::Here => self.put_seen(seen, now),
        }
    }

    /// The API server has said where a pod is: what was seen of it before counts, or is refused, now.
    pub(super) fn take_early(&mut self, uid: &str, now: Stamp) {
        let holds = |report: &&Report| report.early.contains_key(uid);
        let nodes: Vec<String> =
            self.reports.values().filter(holds).map(|it| it.node.clone()).collect();
        for node in nodes {
            let place = self.place(&node, uid);
            let mut reports = self.reports.values_mut().filter(|it| it.node == node);
            let Some(report) = reports.find(|it| it.early.contains_key(uid)) else { continue };
            match place {
                Place::Unknown => {}
                Place::Here => {
                    if let Some(seen) = report.early.remove(uid) {
                        self.put_seen(seen, now);
                    }
                }
                Place::There(other) => {
                    report.early.remove(uid);
                    report.pods.remove(uid);
                    self.refuse_report(&node, uid, &other);
                }
            }
        }
    }

    /// A pod is gone for good: nothing that was reported of it matters any more.
    pub(super) fn forget_reports(&mut self, uid: &str) {
        self.world.seen.remove(uid);
        self.world.followers.forget(uid);
        for report in self.reports.values_mut() {
            report.early.remove(uid);
            report.pods.remove(uid);
        }
    }

    fn put_seen(&mut self, seen: PodSeen, now: Stamp) {
        let Some(app) = self.owners.get(&seen.uid).cloned() else { return };
        let (uid, idle) = (seen.uid.clone(), seen.in_flight == 0);
        let known = self.world.seen.get(&uid);
        let same =
            known.is_some_and(|it| *it == PodSeen { in_flight: it.in_flight, ..seen.clone() });
        // Only counts change most of the time, and nothing more is asked then.
        let told = if same { None } else { plan::serves(&self.world, &app, &uid) };
        self.world.seen.insert(uid.clone(), seen);
        // After a restart agents say of every pod what the kubelet has said already.
        let same = same || told.is_some() && told == plan::serves(&self.world, &app, &uid);
        if !same || (idle && self.draining.contains(&app)) {
            self.settle(&app, None, false, now);
        }
    }

    pub(super) fn unsee(&mut self, who: &Subscriber, uid: &str, now: Stamp) {
        if let Place::There(node) = self.place(&who.node, uid) {
            return self.refuse_report(&who.node, uid, &node);
        }
        if let Some(report) = self.reports.get_mut(&reporter(who)) {
            report.pods.remove(uid);
            report.early.remove(uid);
        }
        self.forget_seen(uid, now);
    }

    /// What its agent does not see is not there, whatever was remembered of it.
    fn forget_seen(&mut self, uid: &str, now: Stamp) {
        let seen = self.world.seen.remove(uid).is_some();
        let Some(name) = self.owners.get(uid).cloned() else { return };
        let pods = self.world.apps.get_mut(&name).map(|app| &mut app.revisions);
        let mut pods = pods.into_iter().flatten().flat_map(|it| &mut it.pods);
        let remembered = pods.find(|pod| *pod.uid == *uid).and_then(|it| it.remembered.take());
        if seen || remembered.is_some() {
            self.settle(&name, None, false, now);
        }
    }

    /// Where the API server has put a pod, as an agent on `node` sees it.
    fn place(&self, node: &str, uid: &str) -> Place {
        let app = self.owners.get(uid).and_then(|app| self.world.apps.get(app));
        let pod = app.and_then(|app| app.pods().find(|(_, pod)| *pod.uid == *uid));
        match pod.map(|(_, pod)| pod.placed.as_deref()) {
            None => Place::Unknown,
            // The local node has no other.
            Some(None) => Place::Here,
            Some(Some(placed)) if placed.node.is_empty() => Place::Unknown,
            Some(Some(placed)) if *placed.node == *node => Place::Here,
            Some(Some(placed)) => Place::There(placed.node.to_string()),
        }
    }

    /// An agent speaks of a pod of another node: it could take its requests, or keep it from having any.
    fn refuse_report(&mut self, from: &str, pod: &str, node: &str) {
        warn!(from, pod, node, "report refused: the pod runs on another node");
        self.effects.refused += 1;
    }

    pub(super) fn settle_draining(&mut self, now: Stamp) {
        for name in self.draining.clone() {
            self.settle(&name, None, false, now);
        }
    }
}

/// Names a reporter: one part may be agent and another activator under the same name.
pub(super) fn reporter(who: &Subscriber) -> String {
    followers::named(who.role, &who.name)
}

/// Pods that serve again, or are gone: whatever was said of their draining speaks of the past.
pub(super) fn forget_revived(
    world: &mut World,
    before: &crate::world::App,
    after: Option<&crate::world::App>,
) {
    let drains = |pod: &crate::world::Pod| pod.stage != crate::world::Stage::Serving;
    for (_, pod) in before.pods().filter(|(_, pod)| drains(pod)) {
        let mut left = after.iter().flat_map(|app| app.pods());
        if !left.any(|(_, it)| it.uid == pod.uid && drains(it)) {
            world.followers.forget(&pod.uid);
        }
    }
}
