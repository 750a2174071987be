//! One clique for each key, and the end of all cliques of a lost member. Begin at [`GpuCliqueCache::join`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use muster_gpu::Gpu;

use crate::clique::GpuClique;
use crate::error::CliqueError;
use crate::key::{CliqueMember, GpuCliqueKey};
use crate::library::{CliqueId, Nccl};
use crate::options::CliqueOptions;
use crate::sync::lock;

/// The cliques of a process.
#[derive(Debug)]
pub struct GpuCliqueCache {
    nccl: &'static Nccl,
    options: CliqueOptions,
    cliques: Mutex<HashMap<GpuCliqueKey, CachedClique>>,
}

/// The number of former ids of the same members that are remembered.
const FORMER_IDS: usize = 16;

/// The clique of a key.
#[derive(Debug)]
struct CachedClique {
    id: CliqueId,
    clique: Arc<GpuClique>,
    /// The ids of the cliques that it and earlier ones replaced, the latest last: a late join with one of them must not replace it.
    former: Vec<CliqueId>,
}

impl GpuCliqueCache {
    /// Creates a cache without cliques.
    #[must_use]
    pub fn new(nccl: &'static Nccl, options: CliqueOptions) -> Self {
        Self { nccl, options, cliques: Mutex::default() }
    }

    /// Returns the clique with this key and id. The first call joins; later ones find it, also while it starts. A clique of the same
    /// members with an earlier id ends: its batches fail.
    ///
    /// `is_current` tells whether a member is current. It is asked before the join and after it, so a loss between the two is not
    /// missed, if the caller changes what it answers before it calls [`GpuCliqueCache::end_cliques_of`].
    ///
    /// # Errors
    /// Returns [`CliqueError::MemberLost`] for a member that is not current, the reason of the end of the clique with this id,
    /// [`CliqueError::Ended`] for an id that another one has replaced, or the errors of [`GpuClique::start`].
    pub fn join(
        &self,
        key: &GpuCliqueKey,
        id: CliqueId,
        local: &[(CliqueMember, Gpu)],
        is_current: impl Fn(&CliqueMember) -> bool,
    ) -> Result<Arc<GpuClique>, CliqueError> {
        let lost = || key.members().iter().find(|member| !is_current(member)).copied();
        if let Some(member) = lost() {
            return Err(CliqueError::MemberLost(member));
        }
        let mut cliques = lock(&self.cliques);
        let replaced = || CliqueError::Ended("its members have begun another one".to_owned());
        match cliques.get(key) {
            Some(CachedClique { id: of, clique, .. }) if *of == id => {
                return clique.end_reason().cloned().map_or_else(|| Ok(Arc::clone(clique)), Err);
            }
            Some(CachedClique { former, .. }) if former.contains(&id) => return Err(replaced()),
            _ => {}
        }
        let clique = GpuClique::start(self.nccl, key, id, local, self.options)?;
        let earlier = cliques.remove(key);
        let mut former = Vec::new();
        if let Some(earlier) = &earlier {
            former.clone_from(&earlier.former);
            former.push(earlier.id);
            former.drain(..former.len().saturating_sub(FORMER_IDS));
        }
        cliques.insert(key.clone(), CachedClique { id, clique: Arc::clone(&clique), former });
        drop(cliques);
        if let Some(earlier) = earlier {
            earlier.clique.end(replaced());
        }
        if let Some(member) = lost() {
            let mut cliques = lock(&self.cliques);
            if cliques.get(key).is_some_and(|cached| cached.id == id) {
                cliques.remove(key);
            }
            drop(cliques);
            clique.end(CliqueError::MemberLost(member));
            return Err(CliqueError::MemberLost(member));
        }
        Ok(clique)
    }

    /// Ends all cliques with a member that `is_lost` tells of, also those that are starting: all at the same time.
    pub fn end_cliques_of(&self, is_lost: impl Fn(&CliqueMember) -> bool) {
        let mut ended = Vec::new();
        lock(&self.cliques).retain(|key, cached| {
            let lost = key.members().iter().find(|member| is_lost(member));
            ended.extend(lost.map(|member| (Arc::clone(&cached.clique), *member)));
            lost.is_none()
        });
        for (clique, member) in ended {
            clique.end(CliqueError::MemberLost(member));
        }
    }

    /// Ends all cliques.
    pub fn end_all(&self, reason: &str) {
        let ended = std::mem::take(&mut *lock(&self.cliques));
        for cached in ended.into_values() {
            cached.clique.end(CliqueError::Ended(reason.to_owned()));
        }
    }

    /// Returns the number of cliques that were joined and not replaced, those that have failed included.
    #[must_use]
    pub fn len(&self) -> usize {
        lock(&self.cliques).len()
    }

    /// Returns whether [`len`](Self::len) is 0.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
