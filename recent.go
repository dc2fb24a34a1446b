package nsq

import "sync"

// recentIDs remembers the last message IDs that were added, to tell people whether a message that is given up ever ran
// in this process.
type recentIDs struct {
	mu   sync.Mutex // guards the fields below
	set  map[MessageID]int
	ring []MessageID
	next int
}

const maxRecentIDs = 4096

func (r *recentIDs) add(id MessageID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.set == nil {
		r.set = make(map[MessageID]int)
	}
	r.set[id]++
	if len(r.ring) < maxRecentIDs {
		r.ring = append(r.ring, id)
		return
	}
	old := r.ring[r.next]
	if r.set[old]--; r.set[old] == 0 {
		delete(r.set, old)
	}
	r.ring[r.next] = id
	r.next = (r.next + 1) % maxRecentIDs
}

func (r *recentIDs) has(id MessageID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.set[id] > 0
}
