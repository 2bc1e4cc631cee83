//! Pure: manifests on the local platform, which has no API server: generations, UIDs, and objects that exist at once.

use std::sync::Arc;

use common::wire::NamespacedName;
use tracing::info;

use super::{ControllerStateMachine, allot};
use crate::{
    plan,
    world::{
        AppState, ConfigurationState, ObjectMetaSummary, RouteState, ServiceManifest, ServiceState,
        Uid, UnixMillis,
    },
};

impl ControllerStateMachine {
    pub(super) fn apply(
        &mut self,
        name: NamespacedName,
        mut manifest: ServiceManifest,
        now: UnixMillis,
    ) {
        manifest.template = self.world.templates.share(&manifest.template);
        let before = self.world.apps.get(&name).map(|app| AppState::clone(app));
        // An app that is being deleted is replaced by a new one, with UIDs of its own.
        let staying = before.clone().filter(|app| !app.leaving());
        if let Some(revision) = staying.as_ref().and_then(|app| clash(app, &manifest)) {
            let why = format!(
                "Saw the following changes without a name change (-old +new): spec.template.metadata.name (give another name than {revision:?}, or none)"
            );
            return self.refuse(name, &why, now);
        }
        let mut app = staying.unwrap_or_else(|| self.fresh(&name, now));
        if !amend(&mut app, manifest, &name) {
            return;
        }
        allot::allot(&mut app, &name, &mut self.world);
        if let Some(leaving) = before.as_ref().filter(|app| app.leaving()) {
            // The autoscaler still counts the Revision of this name, and sends a decision only if it changes.
            plan::revision::ensure(&mut app, &name, &self.world, now);
            for revision in &mut app.revisions {
                revision.decided = leaving.revision(&revision.name).and_then(|it| it.decided);
            }
        }
        self.index(&name, before.as_ref(), Some(&app));
        self.world.apps.insert(name.clone(), Box::new(app));
        self.settle(&name, before.as_ref(), true, now);
    }

    fn fresh(&mut self, name: &NamespacedName, now: UnixMillis) -> AppState {
        self.born += 1;
        let born = self.born.to_string();
        let meta = |kind: &str| ObjectMetaSummary {
            uid: Uid::derive(self.world.seed, &[kind, &name.namespace, &name.name, &born]),
            generation: 0,
            created: now,
        };
        AppState {
            service: Some(ServiceState { meta: meta("Service"), ..ServiceState::default() }),
            configuration: Some(ConfigurationState {
                meta: meta("Configuration"),
                ..ConfigurationState::default()
            }),
            route: Some(RouteState { meta: meta("Route"), ..RouteState::default() }),
            ..AppState::default()
        }
    }

    pub(super) fn refuse(&mut self, name: NamespacedName, why: &str, now: UnixMillis) {
        let before = self.world.apps.get(&name).map(|app| AppState::clone(app));
        let staying = before.clone().filter(|app| !app.leaving());
        let mut app = staying.unwrap_or_else(|| self.fresh(&name, now));
        info!(service = %name, why, "manifest refused");
        if let Some(service) = &mut app.service {
            service.refused = Some(why.into());
        }
        self.world.apps.insert(name.clone(), Box::new(app));
        self.settle(&name, before.as_ref(), true, now);
    }

    pub(super) fn delete(&mut self, name: &NamespacedName, now: UnixMillis) {
        let Some(app) = self.world.apps.get_mut(name).filter(|app| !app.leaving()) else { return };
        let before = AppState::clone(app);
        if let Some(service) = &mut app.service {
            service.leaving = true;
        }
        info!(service = %name, "service deleted");
        // After the plan: until it has removed the routes, no other app may get the addresses.
        self.settle(name, Some(&before), true, now);
        allot::release(name, &before, &mut self.world);
    }
}

/// Returns the Revision with the name that the manifest sets, if it has another template.
fn clash(app: &AppState, manifest: &ServiceManifest) -> Option<Box<str>> {
    let named = app.revision(manifest.revision.as_ref()?)?;
    (named.template != manifest.template).then(|| named.name.clone())
}

/// Applies a manifest to an app; each changed object gets a new generation. Returns true if anything changed.
fn amend(app: &mut AppState, manifest: ServiceManifest, name: &NamespacedName) -> bool {
    let (Some(service), Some(configuration), Some(route)) =
        (&mut app.service, &mut app.configuration, &mut app.route)
    else {
        return false;
    };
    let template = service.manifest.template != manifest.template;
    let traffic = service.manifest.traffic != manifest.traffic;
    // An unchanged manifest still counts if a refused one came in between: it ends the refusal.
    if service.manifest == manifest && service.refused.is_none() {
        return false;
    }
    configuration.meta.generation += u32::from(template);
    route.meta.generation += u32::from(traffic);
    service.meta.generation += u32::from(template || traffic);
    info!(service = %name, generation = service.meta.generation, template, traffic, "manifest applied");
    configuration.template = Arc::clone(&manifest.template);
    configuration.revision.clone_from(&manifest.revision);
    route.wanted = Arc::clone(&manifest.traffic);
    service.manifest = manifest;
    service.refused = None;
    true
}
