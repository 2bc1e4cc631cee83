//! Pure: which images of which Revisions must be resolved to digests, and what came out.

use common::wire::Name;

use super::Machine;
use crate::{
    digests::queue::{Account, Wanted},
    plan::{CONTAINER_MISSING, Facts},
    world::{App, Platform, Revision, Stamp, Why},
};

/// Digests by container, init containers first; or why there are none.
pub type Resolved = Result<Vec<(String, String)>, String>;

impl Machine {
    /// Names Revisions whose digests are to be found out, or no longer: they are gone.
    pub(super) fn ask_digests(&mut self, app: &Name, before: &App, after: Option<&App>) {
        if self.world.settings.platform != Platform::Kubernetes || !self.world.leads {
            return;
        }
        let open = |it: &&Revision| it.digests.is_empty();
        let named = |it: &Revision| Name::new(app.namespace.clone(), &*it.name);
        let wanted = after.iter().flat_map(|app| &app.revisions).filter(open);
        let lost = |it: &&Revision| after.is_none_or(|app| app.revision(&it.name).is_none());
        let lost = before.revisions.iter().filter(open).filter(lost);
        self.effects.resolve.extend(wanted.chain(lost).map(named));
    }

    /// What must be known of a Revision's images; `None`: nothing, or nothing more.
    pub fn wanted_digests(&self, name: &Name) -> Option<Wanted> {
        let revision = self.world.revision(&name.namespace, &name.name)?;
        if !revision.digests.is_empty() || !self.world.leads {
            return None;
        }
        let facts = Facts::of(revision, &self.world);
        let pod = &facts.template.spec.pod;
        let containers = pod.init_containers.iter().flatten().chain(&pod.containers);
        let image = |it: &k8s_openapi::api::core::v1::Container| {
            (it.name.clone(), it.image.clone().unwrap_or_default())
        };
        let config = &self.world.settings.configs.deployment;
        let secrets = pod.image_pull_secrets.iter().flatten().map(|it| it.name.clone());
        Some(Wanted {
            account: Account {
                namespace: name.namespace.to_string(),
                service_account: pod.service_account_name.clone().unwrap_or_default(),
                pull_secrets: secrets.collect(),
            },
            images: containers.map(image).collect(),
            skipped: config.skipped_registries.clone(),
            timeout: config.digest_timeout,
        })
    }

    /// A Revision's images are resolved, or cannot be.
    pub(super) fn resolved(&mut self, name: &Name, resolved: Resolved, now: Stamp) {
        let Some(owner) = self.world.app_of(name) else { return };
        self.change(owner, now, |app, _| {
            let mut all = app.revisions.iter_mut();
            let Some(revision) = all.find(|it| *it.name == *name.name) else { return };
            match resolved {
                Ok(digests) => {
                    let digests = digests.into_iter().map(|(name, it)| (name.into(), it.into()));
                    revision.digests = digests.collect();
                    let failure = revision.failure.take();
                    revision.failure = failure.filter(|it| it.reason != CONTAINER_MISSING);
                }
                Err(why) => revision.failure = Some(Box::new(Why::new(CONTAINER_MISSING, why))),
            }
        });
    }
}
