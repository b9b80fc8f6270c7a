use burn::tensor::{DType, Device, IndexingUpdateOp, Int, Tensor};
use kv_kernels::{scatter_rows, scatter_scalars};

use crate::tensors::{floats, ints};
use crate::{Error, LayerCache, Result, Selection};

/// One victim that goes into a kept slot. Slots count from the head's first one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Merge {
    /// The slot that disappears.
    pub victim: u32,
    /// The slot that stays.
    pub target: u32,
    /// How much the victim counts in the averages of key and value, beside a target that counts 1;
    /// both are further multiplied by their slot's weight (the tokens that it stands for).
    pub importance: f32,
}

/// Merges for every (sequence, key-value head), `[B * Hkv]`, and what is simply dropped besides.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MergePlan {
    /// Merges of each head; a target may take many victims, but is no victim itself.
    pub merges: Vec<Vec<Merge>>,
    /// Slots dropped without a trace, per head.
    pub dropped: Vec<Vec<u32>>,
}

impl MergePlan {
    fn check(&self, cache: &LayerCache) -> Result<()> {
        let pairs = cache.layout().pairs();
        let invalid = |reason: String| Error::InvalidPlan { what: "merge plan", reason };
        if self.merges.len() != pairs || self.dropped.len() != pairs {
            let (merges, dropped) = (self.merges.len(), self.dropped.len());
            return Err(invalid(format!(
                "{merges} heads of merges and {dropped} of drops, the cache has {pairs}"
            )));
        }
        for pair in 0..pairs {
            let length = cache.layout().lengths()[pair];
            let mut gone = vec![false; length];
            let victims = self.merges[pair].iter().map(|merge| merge.victim);
            for slot in victims.chain(self.dropped[pair].iter().copied()) {
                let index = slot as usize;
                let gone = gone.get_mut(index).ok_or(Error::IndexOutOfRange {
                    what: "merge plan",
                    index,
                    limit: length,
                })?;
                if std::mem::replace(gone, true) {
                    return Err(invalid(format!("slot {slot} of head {pair} goes twice")));
                }
            }
            for merge in &self.merges[pair] {
                match gone.get(merge.target as usize) {
                    Some(false) if merge.importance >= 0.0 && merge.importance.is_finite() => {}
                    Some(false) => {
                        let importance = merge.importance;
                        return Err(invalid(format!("importance {importance} must be >= 0")));
                    }
                    Some(true) => {
                        let target = merge.target;
                        return Err(invalid(format!("target {target} of head {pair} goes itself")));
                    }
                    None => {
                        return Err(Error::IndexOutOfRange {
                            what: "merge plan",
                            index: merge.target as usize,
                            limit: length,
                        });
                    }
                }
            }
        }
        Ok(())
    }
}

impl LayerCache {
    /// Merges victims into their targets, then drops them and what else the plan drops, in place.
    ///
    /// A merged slot's key and value are averages weighted by `w_i * importance_i` and its weight
    /// is the sum of the weights, so that the tokens represented stay the same. Tracks add up.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] and [`Error::IndexOutOfRange`] for plans that contradict themselves
    /// or the cache, which is then unchanged.
    pub fn merge(&mut self, plan: &MergePlan) -> Result<()> {
        plan.check(self)?;
        let device = self.options.device.clone();
        let Some(gather) = Gather::new(self, plan, &device) else {
            return self.retain(&self.survivors(plan)?);
        };
        let slots = self.keys().dims()[0];
        let log_weights = match &self.log_weights {
            Some(weights) => weights.clone(),
            None => Tensor::zeros([slots], (&device, DType::F32)),
        };
        let mut weights = log_weights.exp();
        let members = weights.clone().select(0, gather.members.clone());
        let coefficients = members * gather.importance.clone();
        let total = gather.sum(weights.clone());
        scatter_scalars(&mut weights, gather.targets.clone(), total)?;
        let dtype = self.options.dtype;
        for pool in [&mut self.keys, &mut self.values] {
            let average = gather.average(pool, &coefficients);
            scatter_rows(pool, gather.targets.clone(), average.cast(dtype))?;
        }
        for track in self.tracks.values_mut() {
            let total = gather.sum(track.values.clone());
            scatter_scalars(&mut track.values, gather.targets.clone(), total)?;
        }
        self.set_log_weights(weights.log())?;
        let survivors = self.survivors(plan)?;
        self.retain(&survivors)
    }

    fn survivors(&self, plan: &MergePlan) -> Result<Selection> {
        let kept = (0..self.layout.pairs()).map(|pair| {
            let mut stays = vec![true; self.layout.lengths()[pair]];
            let victims = plan.merges[pair].iter().map(|merge| merge.victim);
            for slot in victims.chain(plan.dropped[pair].iter().copied()) {
                stays[slot as usize] = false;
            }
            (0..stays.len() as u32).filter(|&slot| stays[slot as usize]).collect()
        });
        Selection::new(kept.collect())
    }
}

/// The slots that take part in merges: `members` of group `groups[m]` go into `targets[group]`.
struct Gather {
    targets: Tensor<1, Int>,
    members: Tensor<1, Int>,
    groups: Tensor<1, Int>,
    importance: Tensor<1>,
    count: usize,
    device: Device,
}

impl Gather {
    /// `None` where nothing is merged.
    fn new(cache: &LayerCache, plan: &MergePlan, device: &Device) -> Option<Self> {
        let (mut targets, mut members, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        let mut importance = Vec::new();
        for (pair, merges) in plan.merges.iter().enumerate() {
            let offset = cache.layout().offsets()[pair] as i32;
            let mut group_of = std::collections::BTreeMap::new();
            for merge in merges {
                let group = *group_of.entry(merge.target).or_insert_with(|| {
                    let slot = offset + merge.target as i32;
                    targets.push(slot);
                    members.push(slot);
                    groups.push(targets.len() as i32 - 1);
                    importance.push(1.0);
                    targets.len() as i32 - 1
                });
                members.push(offset + merge.victim as i32);
                groups.push(group);
                importance.push(merge.importance);
            }
        }
        let (count, total) = (targets.len(), members.len());
        (count > 0).then(|| Self {
            targets: ints(targets, [count], device),
            members: ints(members, [total], device),
            groups: ints(groups, [total], device),
            importance: floats(importance, [total], device),
            count,
            device: device.clone(),
        })
    }

    /// Sums a per-slot number over each group.
    fn sum(&self, values: Tensor<1>) -> Tensor<1> {
        self.add_up(values.select(0, self.members.clone()))
    }

    /// Sums each group's numbers or rows.
    fn add_up<const D: usize>(&self, values: Tensor<D>) -> Tensor<D> {
        let mut shape = values.dims();
        shape[0] = self.count;
        let zeros = Tensor::zeros(shape, (&self.device, DType::F32));
        zeros.select_assign(0, self.groups.clone(), values, IndexingUpdateOp::Add)
    }

    /// The weighted average of each group's rows, in f32.
    fn average(&self, pool: &Tensor<2>, coefficients: &Tensor<1>) -> Tensor<2> {
        let rows = pool.clone().select(0, self.members.clone()).cast(DType::F32);
        let sums = self.add_up(rows * coefficients.clone().unsqueeze_dim(1));
        sums / self.add_up(coefficients.clone()).unsqueeze_dim(1)
    }
}
