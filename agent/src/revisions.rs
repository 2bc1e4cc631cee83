//! Shell: keeps the totals of Revisions: reads pods' rows, and stores what has to outlive the agent.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use common::{
    link::{RouteBatch, chain},
    wire::{Name, RouteChange, RouteKey},
};
use tracing::warn;

use crate::{
    lock,
    maps::{self, Maps, ledger::Ledger},
    plan::Terms,
    tallies::{Levels, Row, Tallies},
};

/// Totals for the metrics page. Cheap to clone; all clones share the totals.
pub(crate) type Shown = Arc<Mutex<Tallies>>;

/// Totals of Revisions as the agent's loop maintains them.
#[derive(Debug)]
pub(crate) struct Revisions {
    shown: Shown,
    /// Maps of stored totals; `None` if the kernel has no room for them. Then totals start at zero with each agent.
    ledger: Option<Ledger>,
}

impl Revisions {
    /// Resumes from the previous agent's totals. Nothing is exported before they are complete.
    pub(crate) fn resume(maps: &Maps, shown: Shown) -> Self {
        let ledger = maps.ledger();
        let ledger = ledger.inspect_err(|error| {
            warn!(error = %chain(error), "totals of revisions will begin anew with the next agent");
        });
        let mut ledger = ledger.ok();
        let begun = ledger.as_mut().map(|ledger| begin(ledger, maps)).transpose();
        let begun = begun.inspect_err(|error| {
            warn!(error = %chain(error), "totals of revisions begin anew");
        });
        let mut tallies = begun.ok().flatten().unwrap_or_default();
        read(&mut tallies, maps);
        // Only now: totals without their rows would be less than the previous agent has exported.
        *lock(&shown) = tallies;
        Self { shown, ledger }
    }

    /// Assigns a row to a pod of this Revision, in the namespace with this cookie.
    pub(crate) fn add(&mut self, slot: u32, cookie: u64, revision: &Name, terms: Terms) {
        let mut tallies = lock(&self.shown);
        tallies.begin(slot, revision);
        tallies.own(revision, [terms.service, terms.configuration]);
        drop(tallies);
        self.write(|ledger| ledger.own(cookie, Some(revision)));
    }

    /// Marks a row's pod as gone.
    pub(crate) fn remove(&mut self, slot: u32, cookie: u64, maps: &Maps) {
        // Read once more, so that the stored sum has the pod's last requests.
        read(&mut lock(&self.shown), maps);
        lock(&self.shown).end(Instant::now(), slot);
        self.save();
        self.write(|ledger| ledger.own(cookie, None));
    }

    /// Returns the Revisions with totals here that a batch of the RouteTable names, each with true if it still exists.
    pub(crate) fn told_of(&self, news: &RouteBatch) -> Vec<(Name, bool)> {
        let tallies = lock(&self.shown);
        let told = tallies.revisions().filter_map(|name| {
            let lives = match news.changes.get(&RouteKey::Revision(name.clone())) {
                Some(change) => !matches!(change, RouteChange::Gone(_)),
                None if news.is_whole => false,
                None => return None,
            };
            Some((name.clone(), lives))
        });
        told.collect()
    }

    /// Applies the changes of Revisions, after the planner has their terms.
    pub(crate) fn follow(&mut self, told: Vec<(Name, bool)>, terms: impl Fn(&Name) -> Terms) {
        let mut tallies = lock(&self.shown);
        for (name, lives) in told {
            if lives {
                let Terms { service, configuration, .. } = terms(&name);
                tallies.own(&name, [service, configuration]);
            } else {
                tallies.forget(&name);
            }
        }
        drop(tallies);
        self.save();
    }

    /// Reads every row. Must be called before a row is cleared.
    pub(crate) fn read(&mut self, maps: &Maps) {
        let mut tallies = lock(&self.shown);
        read(&mut tallies, maps);
        tallies.settle(Instant::now());
        drop(tallies);
        self.save();
    }

    fn save(&mut self) {
        let unsaved = lock(&self.shown).take_unsaved();
        for (name, left) in unsaved {
            self.write(|ledger| ledger.leave(&name, left));
        }
    }

    fn write(&mut self, act: impl FnOnce(&mut Ledger) -> Result<(), maps::Error>) {
        let Some(ledger) = &mut self.ledger else { return };
        if let Err(error) = act(ledger) {
            warn!(error = %chain(&error), "a total of a revision will be missing with the next agent");
        }
    }
}

/// Reads the previous agent's sums of gone pods, and the owners of the rows.
fn begin(ledger: &mut Ledger, maps: &Maps) -> Result<Tallies, maps::Error> {
    let mut tallies = Tallies::resume(ledger.left()?);
    let pods = maps.pods()?;
    for (cookie, name) in ledger.owners()? {
        match pods.get(&cookie) {
            Some(pod) => tallies.begin(pod.slot, &name),
            // The agent ended between the two deletions of a pod.
            None => ledger.own(cookie, None)?,
        }
    }
    Ok(tallies)
}

fn read(tallies: &mut Tallies, maps: &Maps) {
    for slot in tallies.slots() {
        let state = maps.state(slot);
        let row = Row {
            responses: maps.responses(slot),
            started: maps.totals(slot).started,
            desync: state.desync,
            stray: state.stray,
        };
        let levels = Levels {
            in_flight: state.in_flight,
            connections: state.connections,
            estimated: state.opaque,
        };
        tallies.read(slot, row, levels);
    }
}
