"""A launch on several machines: a launcher and an agent on each. A launch on one machine imports nothing of it.

launcher   runner            attempts of the job: the agent decides when, and with which ranks
             link            this node's part while they run: what it sends, what it concludes from heartbeats
               peers         what is known of the other nodes; the agreement with them on a last step
               agent_client  connection to the agent; the wait until all nodes have joined
                 agent_process, network
agent      agent             torch's elastic agent, in a process of its own
             rendezvous      the store where the nodes meet, and torch's handlers on it
             heartbeats      state of each node, exchanged through that store
both       messages
"""
