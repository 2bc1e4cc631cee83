//! Pure: traffic as wanted → Revisions with shares that add up (knative/serving `pkg/reconciler/route/traffic`).

use common::wire::Name;

use crate::world::{App, Assigned, Kind, Revision, Routing, Stamp, Truth, Why};

/// Moves `latestReady` to the newest Revision that is ready, never backwards but by name.
pub(super) fn latest_ready(app: &mut App) {
    let is_ready = |revision: &&Revision| revision.conditions.is_true(Kind::RevisionReady);
    let created = app.latest_created().filter(is_ready);
    let least = app.latest_ready.as_ref().and_then(|name| app.revision(name));
    let least = least.map_or(0, |revision| revision.meta.generation);
    let up_to = app.configuration.generation;
    let newest = || {
        let all = app.revisions.iter().filter(is_ready);
        let between = all.filter(|it| (least..=up_to).contains(&it.meta.generation));
        between.max_by_key(|it| it.meta.generation)
    };
    if let Some(revision) = created.or_else(newest) {
        app.latest_ready = Some(revision.name.clone());
    }
}

/// Assigns traffic. Where a target cannot be resolved the old assignment stays in force.
pub(super) fn assign(app: &mut App, name: &Name, now: Stamp) {
    if app.leaving {
        app.traffic.clear();
        return;
    }
    let truth = match resolve(app, name) {
        Ok(assigned) => {
            app.traffic = assigned;
            Truth::True(None)
        }
        Err(truth) => truth,
    };
    app.conditions.set(Kind::RouteTraffic, truth, now);
}

fn resolve(app: &App, name: &Name) -> Result<Vec<Assigned>, Truth> {
    let targets = app.manifest.traffic.iter();
    let assigned = targets.map(|target| {
        let revision = match &target.revision {
            None => latest(app, name)?,
            Some(wanted) => named(app, wanted)?,
        };
        Ok(Assigned {
            tag: target.tag.clone(),
            revision,
            latest: target.revision.is_none(),
            percent: target.percent,
        })
    });
    assigned.collect()
}

fn latest(app: &App, name: &Name) -> Result<Box<str>, Truth> {
    if let Some(latest) = &app.latest_ready {
        return Ok(latest.clone());
    }
    let configuration = &name.name;
    Err(match app.conditions.get(Kind::ConfigurationReady) {
        Truth::False(_) => Truth::False(Why::new(
            "RevisionMissing",
            format!("Configuration {configuration:?} does not have any ready Revision."),
        )),
        Truth::True(_) | Truth::Unknown(_) => Truth::Unknown(Some(Why::new(
            "RevisionMissing",
            format!("Configuration {configuration:?} is waiting for a Revision to become ready."),
        ))),
    })
}

fn named(app: &App, wanted: &str) -> Result<Box<str>, Truth> {
    let missing = |message| Truth::False(Why::new("RevisionMissing", message));
    let Some(revision) = app.revision(wanted) else {
        return Err(missing(format!("Revision {wanted:?} referenced in traffic not found.")));
    };
    // One that had traffic keeps it: its pods may come back, and nobody else was named.
    let had = app.traffic.iter().any(|it| *it.revision == *wanted);
    match revision.conditions.get(Kind::RevisionReady) {
        Truth::True(_) => Ok(revision.name.clone()),
        Truth::Unknown(_) | Truth::False(_) if had => Ok(revision.name.clone()),
        Truth::False(_) => Err(missing(format!("Revision {wanted:?} failed to become ready."))),
        Truth::Unknown(_) => Err(Truth::Unknown(Some(Why::new(
            "RevisionMissing",
            format!("Revision {wanted:?} is not yet ready."),
        )))),
    }
}

/// Notes which Revisions a route leads to (knative/serving `pkg/reconciler/labeler`).
pub(super) fn label(app: &mut App, now: Stamp) {
    let mut active: Vec<Box<str>> = app.traffic.iter().map(|it| it.revision.clone()).collect();
    if !app.leaving {
        active.extend(app.manifest.traffic.iter().filter_map(|it| it.revision.clone()));
        if app.manifest.traffic.iter().any(|it| it.revision.is_none()) {
            active.extend(app.latest_created().map(|it| it.name.clone()));
        }
    }
    for revision in &mut app.revisions {
        let is = if active.contains(&revision.name) { Routing::Active } else { Routing::Reserve };
        if revision.routing.0 != is {
            revision.routing = (is, now);
        }
    }
}

/// Shares by Revision; targets without a share are left out. The result adds up to 100 or is empty.
pub(super) fn shares(traffic: &[Assigned]) -> Vec<(&str, u8)> {
    let mut shares: Vec<(&str, u8)> = Vec::with_capacity(traffic.len());
    for target in traffic.iter().filter(|target| target.percent > 0) {
        match shares.iter_mut().find(|(revision, _)| *revision == &*target.revision) {
            Some((_, percent)) => *percent += target.percent,
            None => shares.push((&target.revision, target.percent)),
        }
    }
    shares
}
