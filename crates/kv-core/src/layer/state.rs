//! State that a policy keeps beside a layer's slots.
//!
//! A policy needs more than tracks and tensors where its state has parts of its own, such as a
//! sketch with its hash functions. It implements [`PolicyState`] for a type and gives the cache an
//! object of it. The cache knows nothing of what is inside: it moves, copies, joins, counts, saves
//! and loads the object through the trait, and tells it of what happens to the slots.
//!
//! Files do not say which type a state is of. A loaded cache holds what the file has of the state
//! until its policy calls [`LayerCache::restore_state`].

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt::Debug;

use burn::tensor::{Device, TensorData};
use serde_json::Value;

use crate::{Error, LayerCache, Result};

/// State of a policy in one layer's cache, on the cache's device.
///
/// Methods that tell of an event have defaults that do nothing.
pub trait PolicyState: Any + Debug + Send + Sync {
    /// The state's name among all states of a cache, and in files.
    fn name(&self) -> &'static str;

    /// A deep copy: a kernel that writes into this state must not write into the copy. `None` for
    /// state that is of one step only, which copies do not have.
    fn copied(&self) -> Option<Box<dyn PolicyState>>;

    /// The state on another device; `None` as for [`Self::copied`].
    fn to_device(&self, device: &Device) -> Option<Box<dyn PolicyState>>;

    /// The state of several caches of one layer whose sequences are batched: `self` is that of the
    /// first cache, `others` those of all others, in order, and of the same name.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] for states that cannot be joined.
    fn joined(&self, others: &[&dyn PolicyState]) -> Result<Box<dyn PolicyState>>;

    /// The state in host memory. `None` as for [`Self::copied`].
    ///
    /// # Errors
    /// [`Error::Read`] where the device gives nothing back.
    fn to_host(&self) -> Result<Option<HostState>>;

    /// Whether files can hold the state. Saving a cache is refused before anything is read where
    /// one of its states says no.
    fn is_savable(&self) -> bool {
        true
    }

    /// Bytes that the state takes beside a cache.
    fn bytes(&self, cache: &LayerCache) -> StateBytes;

    /// Whether there is room for so many more tokens of every sequence; a growable cache makes
    /// room.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`].
    fn check_room(&self, _tokens: usize, _growable: bool) -> Result<()> {
        Ok(())
    }

    /// Makes room for so many more tokens of every sequence, before they are appended.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`] where there is none and the cache does not grow.
    fn reserve(&mut self, tokens: usize, growable: bool) -> Result<()> {
        self.check_room(tokens, growable)
    }

    /// Every sequence has seen so many tokens more.
    fn appended(&mut self, _tokens: usize) {}

    /// Slots have moved or were made anew: the pool is another one, or holds other rows.
    ///
    /// # Errors
    /// Those of the kernels that bring the state up to date.
    fn slots_moved(&mut self, _cache: &LayerCache) -> Result<()> {
        Ok(())
    }

    /// Counts so many more tokens of every sequence as seen, whatever they were: for measurements
    /// of what long contexts cost.
    ///
    /// # Errors
    /// [`Error::CapacityExhausted`].
    fn assume(&mut self, tokens: usize) -> Result<()> {
        self.reserve(tokens, false)?;
        self.appended(tokens);
        Ok(())
    }

    /// Slots of a head within a step and behind it, where the state's steps change lengths by
    /// themselves; the head has `before` slots before the step. `None` where they do not.
    fn lengths_of_step(&self, _head: usize, _before: usize) -> Option<StepLengths> {
        None
    }

    /// Whether the state means nothing any more once slots are appended, dropped or reordered
    /// otherwise than by its own steps, or once limits change: the cache lets go of it then.
    fn is_void_once_slots_change(&self) -> bool {
        false
    }

    /// Whether the state's own steps set this track's value of a new token, so that an append
    /// leaves it alone.
    fn sets_track(&self, _track: &str) -> bool {
        false
    }

    /// A counter of the host's that steps move on, if there is one. A step that is recorded rather
    /// than run must not move it: it is put back by [`Self::set_counter`].
    fn counter(&self) -> usize {
        0
    }

    /// Puts back what [`Self::counter`] was.
    fn set_counter(&mut self, _counter: usize) {}
}

/// A state that files can hold.
pub trait LoadState: PolicyState + Sized {
    /// As [`PolicyState::name`].
    const NAME: &'static str;

    /// The state out of what [`PolicyState::to_host`] made of it, for a cache whose slots are there
    /// already. `seen` has the tokens that each sequence has seen. A file's content is not to be
    /// trusted: what does not fit is refused.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] that says what does not fit.
    fn load(saved: SavedState, cache: &LayerCache, seen: &[usize]) -> Result<Self>;
}

/// Slots of a head around a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepLengths {
    /// The most that it has within the step, such as before the step gives up slots.
    pub within: usize,
    /// Slots that it has behind the step.
    pub behind: usize,
}

/// Bytes of a state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StateBytes {
    /// On the device.
    pub device: usize,
    /// In host memory.
    pub host: usize,
    /// Working memory of a step on the device, which layers share.
    pub scratch: usize,
}

/// A state in host memory.
#[derive(Debug)]
pub enum HostState {
    /// Numbers that files can hold.
    Saved(SavedState),
    /// An object that lives in host memory anyway, and that no file holds.
    Kept(Box<dyn PolicyState>),
}

impl Clone for HostState {
    fn clone(&self) -> Self {
        match self {
            Self::Saved(saved) => Self::Saved(saved.clone()),
            // What is kept in host memory has copies.
            Self::Kept(state) => match state.copied() {
                Some(copy) => Self::Kept(copy),
                None => Self::Saved(SavedState::default()),
            },
        }
    }
}

/// What a file has of a state.
#[derive(Debug, Clone, Default)]
pub struct SavedState {
    /// What is not a tensor.
    pub header: Value,
    /// Tensors by name.
    pub tensors: BTreeMap<String, TensorData>,
    /// How to make the state of it, where that is known: files do not know.
    pub(crate) load: Option<Load>,
}

pub(crate) type Load = fn(SavedState, &LayerCache, &[usize]) -> Result<Box<dyn PolicyState>>;

impl SavedState {
    /// What is saved of a state of type `T`.
    pub fn of<T: LoadState>(header: Value, tensors: BTreeMap<String, TensorData>) -> Self {
        Self { header, tensors, load: Some(load::<T>) }
    }

    /// Takes out a tensor of one of some dtypes and any shape.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] that names them.
    pub fn take_any(&mut self, name: &str, dtypes: &[burn::tensor::DType]) -> Result<TensorData> {
        let found = self.tensors.get(name).map(|data| data.dtype());
        let own = dtypes.iter().copied().find(|&dtype| Some(dtype) == found);
        self.take(name, own.unwrap_or(dtypes[0]), &[])
    }

    /// Takes out a tensor of a dtype and, where the expected shape is not empty, of that shape.
    ///
    /// # Errors
    /// [`Error::InvalidPlan`] that names both.
    pub fn take(
        &mut self,
        name: &str,
        dtype: burn::tensor::DType,
        shape: &[usize],
    ) -> Result<TensorData> {
        let invalid = |reason: String| Error::InvalidPlan { what: "state", reason };
        let found = self.tensors.remove(name);
        let data = found.ok_or_else(|| invalid(format!("there is no tensor `{name}`")))?;
        let actual: Vec<usize> = data.shape().iter().copied().collect();
        if data.dtype() != dtype || (!shape.is_empty() && actual != shape) {
            let found = data.dtype();
            return Err(invalid(format!(
                "`{name}` is {found:?} {actual:?}, expected {dtype:?} {shape:?}"
            )));
        }
        Ok(data)
    }
}

/// States of one type, `first` and `others`, as [`PolicyState::joined`] is given them.
///
/// # Errors
/// [`Error::InvalidPlan`] where one is of another type.
pub fn states_of<'a, T: PolicyState>(
    first: &'a T,
    others: &[&'a dyn PolicyState],
) -> Result<Vec<&'a T>> {
    let others = others.iter().map(|&other| (other as &dyn Any).downcast_ref());
    let all: Option<Vec<&T>> = std::iter::once(Some(first)).chain(others).collect();
    all.ok_or_else(|| {
        let reason = format!("states of several types have the name `{}`", first.name());
        Error::InvalidPlan { what: "concat", reason }
    })
}

fn load<T: LoadState>(
    saved: SavedState,
    cache: &LayerCache,
    seen: &[usize],
) -> Result<Box<dyn PolicyState>> {
    Ok(Box::new(T::load(saved, cache, seen)?))
}

/// What a cache holds under a state's name.
#[derive(Debug)]
pub(crate) enum Held {
    /// The state.
    State(Box<dyn PolicyState>),
    /// What a file has of it, and the tokens that each sequence has seen.
    Saved(SavedState, Vec<usize>),
}

/// The states of a cache, by name.
#[derive(Debug, Default)]
pub(crate) struct States(pub(crate) BTreeMap<String, Held>);

impl States {
    /// All that are more than what a file has of them.
    pub(crate) fn live(&self) -> impl Iterator<Item = &dyn PolicyState> {
        self.0.values().filter_map(|held| match held {
            Held::State(state) => Some(&**state),
            Held::Saved(..) => None,
        })
    }

    /// [`Self::live`], to be changed.
    pub(crate) fn live_mut(&mut self) -> impl Iterator<Item = &mut Box<dyn PolicyState>> {
        self.0.values_mut().filter_map(|held| match held {
            Held::State(state) => Some(state),
            Held::Saved(..) => None,
        })
    }

    /// Whether some state's own steps set this track of a new token.
    pub(crate) fn set_track(&self, track: &str) -> bool {
        self.live().any(|state| state.sets_track(track))
    }

    /// Lets go of states that mean nothing any more once slots or limits have changed.
    pub(crate) fn drop_void(&mut self) {
        self.0.retain(|_, held| match held {
            Held::State(state) => !state.is_void_once_slots_change(),
            Held::Saved(..) => true,
        });
    }

    /// Each state's counter, in the order of names.
    pub(crate) fn counters(&self) -> Vec<usize> {
        self.live().map(PolicyState::counter).collect()
    }

    /// Puts counters back.
    pub(crate) fn set_counters(&mut self, counters: &[usize]) {
        let each = self.live_mut().zip(counters);
        each.for_each(|(state, counter)| state.set_counter(*counter));
    }

    /// Every state through a change that may leave it out.
    pub(crate) fn map(
        &self,
        change: impl Fn(&dyn PolicyState) -> Option<Box<dyn PolicyState>>,
    ) -> Self {
        let each = self.0.iter().filter_map(|(name, held)| {
            let held = match held {
                Held::State(state) => Held::State(change(&**state)?),
                Held::Saved(saved, seen) => Held::Saved(saved.clone(), seen.clone()),
            };
            Some((name.clone(), held))
        });
        Self(each.collect())
    }

    /// The states of several caches, batched.
    pub(crate) fn joined(parts: &[&Self]) -> Result<Self> {
        let invalid = |reason: String| Error::InvalidPlan { what: "concat", reason };
        let mut names: Vec<&String> = parts.iter().flat_map(|part| part.0.keys()).collect();
        names.sort();
        names.dedup();
        let mut joined = BTreeMap::new();
        for name in names {
            let own: Vec<&Held> = parts.iter().filter_map(|part| part.0.get(name)).collect();
            let mut live = Vec::new();
            for held in &own {
                match held {
                    Held::State(state) => live.push(&**state),
                    Held::Saved(..) => return Err(unrestored(name)),
                }
            }
            let Some((first, others)) = live.split_first() else { continue };
            // State of one step only is not joined.
            if first.copied().is_none() {
                continue;
            }
            if live.len() != parts.len() {
                let (count, all) = (live.len(), parts.len());
                return Err(invalid(format!("state `{name}` is in {count} of {all} caches")));
            }
            joined.insert(name.clone(), Held::State(first.joined(others)?));
        }
        Ok(Self(joined))
    }

    /// Refuses steps while a state is only what a file has of it.
    pub(crate) fn check_restored(&self) -> Result<()> {
        let saved = self.0.iter().find(|(_, held)| matches!(held, Held::Saved(..)));
        saved.map_or(Ok(()), |(name, _)| Err(unrestored(name)))
    }
}

fn unrestored(name: &str) -> Error {
    let reason = format!(
        "`{name}` comes from a file, and no policy has restored it: start with the policy that \
         made the cache"
    );
    Error::InvalidPlan { what: "state", reason }
}

impl LayerCache {
    /// A policy's state of type `T`, where the cache has one.
    pub fn policy_state<T: PolicyState>(&self) -> Option<&T> {
        self.states.live().find_map(|state| (state as &dyn Any).downcast_ref())
    }

    /// [`Self::policy_state`], to be changed.
    pub fn policy_state_mut<T: PolicyState>(&mut self) -> Option<&mut T> {
        self.states.live_mut().find_map(|state| (&mut **state as &mut dyn Any).downcast_mut())
    }

    /// Gives the cache a state; one of the same name goes.
    pub fn insert_policy_state<T: PolicyState>(&mut self, state: T) {
        let name = state.name().to_string();
        self.states.0.insert(name, Held::State(Box::new(state)));
    }

    /// Takes a state of type `T` out of the cache, such as to change it beside the slots.
    pub fn take_policy_state<T: PolicyState>(&mut self) -> Option<T> {
        let is_it = |held: &Held| match held {
            Held::State(state) => (&**state as &dyn Any).is::<T>(),
            Held::Saved(..) => false,
        };
        let name = self.states.0.iter().find(|(_, held)| is_it(held))?.0.clone();
        match self.states.0.remove(&name)? {
            Held::State(state) => (state as Box<dyn Any>).downcast::<T>().ok().map(|state| *state),
            Held::Saved(..) => None,
        }
    }

    /// Makes the state of type `T` of what a file has of it. Nothing happens where the cache has
    /// none from a file.
    ///
    /// # Errors
    /// Those of [`LoadState::load`]; the cache then holds what it held.
    pub fn restore_state<T: LoadState>(&mut self) -> Result<()> {
        let Some(Held::Saved(saved, seen)) = self.states.0.get(T::NAME) else { return Ok(()) };
        let state = T::load(saved.clone(), self, seen)?;
        self.states.0.insert(T::NAME.into(), Held::State(Box::new(state)));
        Ok(())
    }

    /// Tells every state that slots have moved.
    pub(crate) fn tell_slots_moved(&mut self) -> Result<()> {
        let mut states = std::mem::take(&mut self.states);
        let told = states.live_mut().try_for_each(|state| state.slots_moved(self));
        self.states = states;
        told
    }
}
