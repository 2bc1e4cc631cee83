//! Shell: keeps the totals of Revisions: reads pods' rows, and stores what has to outlive the agent.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use common::{
    link::{RouteBatch, error_chain},
    wire::{NamespacedName, RouteChange, RouteKey},
};
use tracing::warn;

use crate::{
    kernel::{
        maps::{self, KernelMaps, stored_totals::StoredTotals},
        totals_row::TotalsRow,
    },
    lock::lock,
    routes::plan::RevisionRequestTerms,
    usage::revision_totals::{RevisionLevels, RevisionTotals},
};

/// Totals for the metrics page. Cheap to clone; all clones share the totals.
pub(crate) type SharedRevisionTotals = Arc<Mutex<RevisionTotals>>;

/// Totals of Revisions as the agent's loop maintains them.
#[derive(Debug)]
pub(crate) struct RevisionTotalsStore {
    totals: SharedRevisionTotals,
    /// Maps of stored totals; `None` if the kernel cannot create them. Then totals start at zero with each agent.
    stored: Option<StoredTotals>,
}

impl RevisionTotalsStore {
    /// Resumes from the previous agent's totals. Nothing is exported before they are complete.
    pub(crate) fn resume(maps: &KernelMaps, totals: SharedRevisionTotals) -> Self {
        let stored = maps.stored_totals().inspect_err(|error| {
            warn!(error = %error_chain(error), "totals of revisions will start from zero with the next agent");
        });
        let mut stored = stored.ok();
        let resumed = stored.as_mut().map(|stored| restore_totals(stored, maps)).transpose();
        let resumed = resumed.inspect_err(|error| {
            warn!(error = %error_chain(error), "totals of revisions start from zero");
        });
        let mut restored = resumed.ok().flatten().unwrap_or_default();
        read_rows(&mut restored, maps);
        // Only now: totals without their rows would be less than the previous agent has exported.
        *lock(&totals) = restored;
        Self { totals, stored }
    }

    /// Assigns a row to a pod of this Revision, in the namespace with this cookie.
    pub(crate) fn assign_slot(
        &mut self,
        slot: u32,
        cookie: u64,
        revision: &NamespacedName,
        terms: RevisionRequestTerms,
    ) {
        let mut totals = lock(&self.totals);
        totals.assign_slot(slot, revision);
        totals.set_owners(revision, [terms.service, terms.configuration]);
        drop(totals);
        self.write_stored(|stored| stored.set_owner(cookie, Some(revision)));
    }

    /// Marks a row's pod as gone.
    pub(crate) fn release_slot(&mut self, slot: u32, cookie: u64, maps: &KernelMaps) {
        // Read once more, so that the stored sum has the pod's last requests.
        read_rows(&mut lock(&self.totals), maps);
        lock(&self.totals).mark_gone(Instant::now(), slot);
        self.save();
        self.write_stored(|stored| stored.set_owner(cookie, None));
    }

    /// Returns the Revisions with totals here that a batch of the RouteTable names, each with true if it still exists.
    pub(crate) fn changed_revisions(&self, batch: &RouteBatch) -> Vec<(NamespacedName, bool)> {
        let totals = lock(&self.totals);
        let revisions = totals.revisions().filter_map(|name| {
            let exists = match batch.changes.get(&RouteKey::Revision(name.clone())) {
                Some(change) => !matches!(change, RouteChange::Removed(_)),
                None if batch.is_snapshot => false,
                None => return None,
            };
            Some((name.clone(), exists))
        });
        revisions.collect()
    }

    /// Applies the changes of Revisions, after the planner has their terms.
    pub(crate) fn apply_changes(
        &mut self,
        revisions: Vec<(NamespacedName, bool)>,
        terms: impl Fn(&NamespacedName) -> RevisionRequestTerms,
    ) {
        let mut totals = lock(&self.totals);
        for (name, exists) in revisions {
            if exists {
                let RevisionRequestTerms { service, configuration, .. } = terms(&name);
                totals.set_owners(&name, [service, configuration]);
            } else {
                totals.forget_revision(&name);
            }
        }
        // `save` takes the lock itself.
        drop(totals);
        self.save();
    }

    /// Reads every row. Must be called before a row is cleared.
    pub(crate) fn read_slots(&mut self, maps: &KernelMaps) {
        let mut totals = lock(&self.totals);
        read_rows(&mut totals, maps);
        totals.fold_expired(Instant::now());
        drop(totals);
        self.save();
    }

    fn save(&mut self) {
        let unsaved = lock(&self.totals).take_unsaved();
        for (name, gone_total) in unsaved {
            self.write_stored(|stored| stored.set_gone_total(&name, gone_total));
        }
    }

    fn write_stored(
        &mut self,
        write: impl FnOnce(&mut StoredTotals) -> Result<(), maps::KernelMapError>,
    ) {
        let Some(stored) = &mut self.stored else { return };
        if let Err(error) = write(stored) {
            warn!(error = %error_chain(&error), "a total of a revision will be missing with the next agent");
        }
    }
}

/// Reads the previous agent's sums of gone pods, and the owners of the rows.
fn restore_totals(
    stored: &mut StoredTotals,
    maps: &KernelMaps,
) -> Result<RevisionTotals, maps::KernelMapError> {
    let mut totals = RevisionTotals::resume(stored.gone_totals()?);
    let pods = maps.pods()?;
    for (cookie, name) in stored.owners()? {
        match pods.get(&cookie) {
            Some(pod) => totals.assign_slot(pod.slot, &name),
            // The agent ended between the two deletions of a pod.
            None => stored.set_owner(cookie, None)?,
        }
    }
    Ok(totals)
}

fn read_rows(totals: &mut RevisionTotals, maps: &KernelMaps) {
    for slot in totals.slots() {
        let state = maps.pod_state(slot);
        let row = TotalsRow {
            responses: maps.responses(slot),
            started: maps.totals(slot).started,
            desync: state.desynced_connections,
            stray: state.stray_responses,
        };
        let levels = RevisionLevels {
            in_flight: state.in_flight,
            connections: state.connections,
            estimated: state.opaque_connections,
        };
        totals.update_slot(slot, row, levels);
    }
}
